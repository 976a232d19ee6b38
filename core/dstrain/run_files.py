"""The files of a run in its output folder: which are its own, how many are kept, and how all of them give way at once.

weights.json     the names of the weights files that the run wrote, with their steps; written before each file is
.overwritten/    what --overwrite is taking away; put back unless all of it was taken
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.checkpoint import states
from dstrain.errors import StateError, SystemFault
from dstrain.files import temporary, write_file, write_json

WEIGHTS = "weights.json"
LOG = "loss.csv"
SAME_LOG = "loss.jsonl"
CONFIG = "config.json"
SET_ASIDE = ".overwritten"
NAMED = re.compile(r"(epoch|step)-\d+(\.\w+)?\.safetensors")
"""Names of weights files: nothing else is ever removed by a record."""
PREVIEW = re.compile(r"step-\d+-\d+\.(png|mp4)|prompts\.json")
"""Names of what `previews` puts into its folder."""


@dataclass
class WeightsFiles:
    """The weights files that a run wrote to its folder: name -> step, in the order they were written."""

    folder: Path
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "WeightsFiles":
        """Read the folder's record; what is no such record lists nothing, so that nothing is taken for the run's."""
        try:
            entries = json.loads((folder / WEIGHTS).read_bytes())
            steps = {name: int(step) for name, step in entries if NAMED.fullmatch(name)}
        except (OSError, ValueError, TypeError):
            steps = {}
        return cls(folder, steps)

    def add(self, names: Iterable[str], step: int) -> None:
        """Record files that are about to be written: what a crash leaves of them is then known to be the run's."""
        for name in names:
            self.steps.pop(name, None)
            self.steps[name] = step
        self._write()

    def prune(self, keep: int) -> None:
        """Remove all but the files of the `keep` steps written last. Raises SystemFault."""
        kept = list(dict.fromkeys(reversed(self.steps.values())))[:keep]
        doomed = [name for name, step in self.steps.items() if step not in kept]
        for name in doomed:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise SystemFault(str(self.folder / name), f"cannot be removed: {error.strerror}") from error
            del self.steps[name]
        if doomed:
            self._write()

    def _write(self) -> None:
        write_json(self.folder / WEIGHTS, [[name, step] for name, step in self.steps.items()])


def traces(folder: Path) -> list[Path]:
    """What says that a folder holds a run: states, newest first, weights files, a log with a step in it."""
    places = (folder, folder / SET_ASIDE)
    weights = [path for place in places for path in sorted(place.glob("*.safetensors")) if NAMED.fullmatch(path.name)]
    logs = [path for place in places if (path := place / LOG).is_file() and path.read_bytes().count(b"\n") > 1]
    return [*(state for place in places for state in states(place)), *weights, *logs]


def refuse_occupied(folder: Path) -> None:
    """Raise StateError if the folder holds a run; whoever wants it to go on or to be removed says so."""
    found = traces(folder)
    if found:
        named = ", ".join(path.name for path in found[:3]) + ", ..." * (len(found) > 3)
        go_on = ("go on with --resume, ",) if any(path.is_dir() for path in found) else ()
        advice = "".join((*go_on, "begin anew with --overwrite, or give another --output_path"))
        raise StateError(str(folder), f"holds a run already: {named}", advice)


def own(folder: Path) -> list[Path]:
    """Everything in the folder that a run of ours wrote, and nothing else."""
    weights = [folder / name for name in WeightsFiles.of(folder).steps]
    records = [folder / name for name in (LOG, SAME_LOG, CONFIG, WEIGHTS)]
    previews = [path for path in sorted(folder.glob("previews/*")) if PREVIEW.fullmatch(path.name)]
    return [*states(folder), *(path for path in (*weights, *previews, *records) if path.is_file())]


def refuse_strangers(folder: Path) -> None:
    """Raise StateError for a file named as a run's weights that no run recorded: --overwrite would not know whose."""
    listed = WeightsFiles.of(folder).steps
    found = [path.name for path in sorted(folder.glob("*.safetensors")) if NAMED.fullmatch(path.name)]
    unknown = [name for name in found if name not in listed]
    if unknown:
        what = f"holds {unknown[0]}, which {WEIGHTS} does not list as written by the run there"
        raise StateError(str(folder), what, "move it away, or give another --output_path")


def take_away(folder: Path) -> None:
    """Remove the run that the folder holds: all of it, or if this is cut off before the end, nothing.

    Its files are moved aside one by one, and only when all are there does their folder get a name that is removed.
    Raises SystemFault.
    """
    aside = folder / SET_ASIDE
    try:
        aside.mkdir()
        for path in own(folder):
            place = aside / path.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            path.rename(place)
        doomed = temporary(folder / "overwritten")
        shutil.rmtree(doomed, ignore_errors=True)
        aside.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        put_back(folder)
        raise SystemFault(str(folder), f"the run there cannot be removed: {error.strerror}") from error


def put_back(folder: Path) -> None:
    """Undo a `take_away` that was cut off; the caller holds the folder's lock. Raises SystemFault."""
    aside = folder / SET_ASIDE
    try:
        if aside.is_dir():
            for path in (*aside.glob("previews/*"), *(path for path in aside.iterdir() if path.name != "previews")):
                path.rename(folder / path.relative_to(aside))
            shutil.rmtree(aside)
    except OSError as error:
        raise SystemFault(str(aside), f"cannot be put back: {error.strerror}") from error


def probe(folder: Path) -> None:
    """Make the folder, write a file there and remove it: one that cannot be written is named early; or SystemFault."""
    path = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, b"dstrain\n")
        path.unlink()
    except (SystemFault, OSError) as error:
        reason = error.what if isinstance(error, SystemFault) else f"cannot be written: {error.strerror}"
        raise SystemFault(str(folder), reason, "nothing was begun") from error
