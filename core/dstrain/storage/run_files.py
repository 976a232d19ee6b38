"""The list of the files that a run wrote to its output folder: run.json."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dstrain.errors import StateError
from dstrain.storage.files import write_json

RUN = "run.json"
BAD_SAMPLES = "bad_samples.jsonl"
"""The list of the rows that a run skips, in its logs."""
AVERAGED = ".ema.safetensors"
"""End of the names of weights files that contain an average over the steps."""


@dataclass
class RunFiles:
    """The files that a run wrote to its folder, as run.json lists them.

    Nothing else in the folder is ever removed, truncated or replaced.
    """

    folder: Path
    steps: dict[str, int] = field(default_factory=dict)
    """Path below the folder -> step it was written for, in the order of writing."""
    committed: bool = False
    """Whether the run has saved a state to resume from."""

    @classmethod
    def read(cls, folder: Path) -> "RunFiles":
        """Read run.json; an invalid file lists nothing."""
        try:
            record = json.loads((folder / RUN).read_bytes())
            steps = {str(path): int(step) for path, step in record["files"]}
            # Older versions did not write it down.
            committed = bool(record.get("committed", True))
        except (OSError, ValueError, TypeError, KeyError):
            steps, committed = {}, False
        for name in steps:
            # No run lists a path outside its folder, nor one of Windows.
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name:
                return cls(folder)
        return cls(folder, steps, committed)

    def add(self, paths: Iterable[str], step: int = 0) -> None:
        """List files that are about to be written, so that a crash leaves none unknown.

        Raises StateError for a file that is there and not listed.
        """
        for path in paths:
            # A link that leads nowhere is somebody's, too.
            if path not in self.steps and os.path.lexists(self.folder / path):
                raise not_listed(self.folder, path)
            if step:
                self.steps.pop(path, None)  # the order is that of writing
            self.steps[path] = step
        self._write()

    def commit(self) -> None:
        """Record that a state was saved: from now on the run can be resumed."""
        if not self.committed:
            self.committed = True
            self._write()

    def remove(self, paths: Iterable[str]) -> None:
        """Remove listed files, and folders that this leaves empty."""
        for name in paths:
            path = self.folder / name
            path.unlink(missing_ok=True)
            remove_empty(path.parent, self.folder)
            del self.steps[name]
        self._write()

    def forget_missing(self) -> None:
        """Drop files that are gone, so that others of their names are not taken for them."""
        paths = [path for path in self.steps if (self.folder / path).exists()]
        self.steps = {path: self.steps[path] for path in paths}
        self._write()

    def weights(self) -> dict[str, int]:
        """Return the weights files listed, which lie in the folder itself, by step."""
        ours = (path for path in self.steps if path.endswith(".safetensors"))
        return {path: self.steps[path] for path in ours if "/" not in path}

    def missing_weights(self) -> list[str]:
        """Return the weights files listed that are gone, newest first."""
        listed = reversed(self.weights())
        return [name for name in listed if not (self.folder / name).exists()]

    def newest_weights(self) -> list[Path]:
        """Return the weights files of the newest step whose files all exist, without
        averages.

        Files are listed before they are written: a run that was killed may lack some.
        """
        steps: dict[int, list[Path]] = {}
        for name, step in reversed(self.weights().items()):
            if not name.endswith(AVERAGED):
                steps.setdefault(step, []).insert(0, self.folder / name)
        for paths in steps.values():
            if all(path.exists() for path in paths):
                return paths
        return []

    def prune_weights(self, keep: int) -> None:
        """Remove all weights but those of the `keep` steps written last."""
        weights = self.weights()
        # Without those that several files of one step repeat.
        kept = list(dict.fromkeys(reversed(weights.values())))[:keep]
        self.remove([path for path, step in weights.items() if step not in kept])

    def _write(self) -> None:
        self.steps[RUN] = 0
        # Pairs, since `write_json` sorts the keys of a dictionary.
        files = list(self.steps.items())
        write_json(self.folder / RUN, {"files": files, "committed": self.committed})


def averaged_name(name: str) -> str:
    """Return the name of a weights file's average: 'epoch-0.ema.safetensors'."""
    return name.removesuffix(".safetensors") + AVERAGED


def not_listed(folder: Path, name: str) -> StateError:
    """Return the error of a file that is in the way, and that no run wrote."""
    what = f"contains {name}, which no run wrote: {RUN} does not list it"
    return StateError(folder, what, "move it away, or give another --output_path")


def remove_empty(folder: Path, output: Path) -> None:
    """Remove a folder below `output` if it is empty, and then those above it."""
    while folder != output and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
