"""The files of a run in its output folder: which are its own, how many are kept, and
how all of them give way at once.

weights.json     the names of the weights files that the run wrote, with their steps;
written before each file is .overwritten/    what --overwrite is taking away; put back
unless all of it was taken
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from dstrain.errors import StateError, SystemFault
from dstrain.runs.checkpoints.state import states
from dstrain.runs.skipped_rows import LIST
from dstrain.storage.files import temporary, write_json

WEIGHTS = "weights.json"
LOG = "loss.csv"
SAME_LOG = "loss.jsonl"
CONFIG = "config.json"
PREVIEWS = "previews"
PROMPTS = "prompts.json"
SET_ASIDE = ".overwritten"
NAMED = re.compile(r"(epoch|step)-\d+(\.\w+)?\.safetensors")
"""Names of weights files: nothing else is ever removed by a record."""
HEADS = MappingProxyType(
    {LOG: b"step,epoch,loss,", SAME_LOG: b'{"step": ', LIST: b'{"file": '}
)
"""How a run's records that are no single JSON value begin."""
PREVIEW = re.compile(rf"step-\d+-\d+\.(png|mp4)|{re.escape(PROMPTS)}")
"""Names of what `previews` puts into its folder."""


@dataclass
class WeightsFiles:
    """The weights files that a run wrote to its folder: name -> step, in the order they
    were written.
    """

    folder: Path
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "WeightsFiles":
        """Read the folder's record; what is no such record lists nothing, so that
        nothing is taken for the run's.
        """
        try:
            entries = json.loads((folder / WEIGHTS).read_bytes())
            steps = {name: int(step) for name, step in entries if NAMED.fullmatch(name)}
        except (OSError, ValueError, TypeError):
            steps = {}
        return cls(folder, steps)

    def add(self, names: Iterable[str], step: int) -> None:
        """Record files that are about to be written: what a crash leaves of them is
        then known to be the run's.
        """
        for name in names:
            self.steps.pop(name, None)
            self.steps[name] = step
        self._write()

    def prune(self, keep: int) -> None:
        """Remove all but the files of the `keep` steps written last. Raises
        SystemFault.
        """
        kept = list(dict.fromkeys(reversed(self.steps.values())))[:keep]
        doomed = [name for name, step in self.steps.items() if step not in kept]
        for name in doomed:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise SystemFault(
                    str(self.folder / name), f"cannot be removed: {error.strerror}"
                ) from error
            del self.steps[name]
        if doomed:
            self._write()

    def _write(self) -> None:
        write_json(
            self.folder / WEIGHTS, [[name, step] for name, step in self.steps.items()]
        )


def traces(folder: Path) -> list[Path]:
    """What says that a folder holds a run: states, newest first, weights files, a log
    with a step in it.
    """
    places = (folder, folder / SET_ASIDE)
    weights = [
        path
        for place in places
        for path in sorted(place.glob("*.safetensors"))
        if NAMED.fullmatch(path.name)
    ]
    logs = [
        path
        for place in places
        if (path := place / LOG).is_file() and path.read_bytes().count(b"\n") > 1
    ]
    return [*(state for place in places for state in states(place)), *weights, *logs]


def refuse_occupied(folder: Path) -> None:
    """Raise StateError if the folder holds a run; whoever wants it to go on or to be
    removed says so.
    """
    found = traces(folder)
    if found:
        named = ", ".join(path.name for path in found[:3]) + ", ..." * (len(found) > 3)
        go_on = (
            ("go on with --resume, ",) if any(path.is_dir() for path in found) else ()
        )
        advice = "".join(
            (*go_on, "begin anew with --overwrite, or give another --output_path")
        )
        raise StateError(str(folder), f"holds a run already: {named}", advice)


def own(folder: Path) -> list[Path]:
    """Everything in the folder that a run of ours wrote, and nothing else.

    The memory of decoded files stays: it is of files, true for every run, and the run
    that overwrites has just used it.
    """
    weights = [folder / name for name in WeightsFiles.of(folder).steps]
    records = [folder / name for name in (LOG, SAME_LOG, CONFIG, WEIGHTS, LIST)]
    previews = [
        path
        for path in sorted(folder.glob(f"{PREVIEWS}/*"))
        if PREVIEW.fullmatch(path.name)
    ]
    return [
        *states(folder),
        *(path for path in (*weights, *previews, *records) if path.is_file()),
    ]


def refuse_strangers(folder: Path, overwrite: bool) -> None:
    """Raise StateError for a file named as one that a run writes, but which none wrote:
    it is the user's.

    Of weights files only if they would be overwritten: then it would not be known whose
    they are.
    """
    records = (folder / name for name in (CONFIG, WEIGHTS, *HEADS))
    reasons = [
        f"{path.name}, which no run wrote"
        for path in records
        if path.exists() and not _is_record(path)
    ]
    if overwrite:
        listed = {
            name
            for place in (folder, folder / SET_ASIDE)
            for name in WeightsFiles.of(place).steps
        }
        found = [
            path.name
            for path in sorted(folder.glob("*.safetensors"))
            if NAMED.fullmatch(path.name)
        ]
        unknown = [name for name in found if name not in listed]
        reasons += [
            f"{name}, which {WEIGHTS} does not list as written by the run there"
            for name in unknown
        ]
    if reasons:
        raise StateError(
            str(folder),
            f"holds {reasons[0]}",
            "move it away, or give another --output_path",
        )


def _is_record(path: Path) -> bool:
    """Whether a file named as a run's record is one; the beginning of one, which a
    crash may leave, is too.
    """
    try:
        data = path.read_bytes()
        if path.name in HEADS:
            return HEADS[path.name].startswith(data[: len(HEADS[path.name])])
        content = json.loads(data)
        if path.name == CONFIG:
            return {"versions", "output_path"} <= set(content)
        return all(
            isinstance(name, str) and isinstance(step, int) for name, step in content
        )
    except (OSError, ValueError, TypeError):
        return False


def take_away(folder: Path) -> None:
    """Remove the run that the folder holds: all of it, or if this is cut off before the
    end, nothing.

    Its files are moved aside one by one, and only when all are there does their folder
    get the name of a temporary, which `remove_leftovers` removes. Raises SystemFault.
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
    except BaseException as error:
        put_back(folder)
        if isinstance(error, OSError):
            raise SystemFault(
                str(folder), f"the run there cannot be removed: {error.strerror}"
            ) from error
        raise


def put_back(folder: Path) -> None:
    """Undo a `take_away` that was cut off; the caller holds the folder's lock. Raises
    SystemFault.
    """
    aside = folder / SET_ASIDE
    try:
        if aside.is_dir():
            for path in (
                *aside.glob(f"{PREVIEWS}/*"),
                *(path for path in aside.iterdir() if path.name != PREVIEWS),
            ):
                path.rename(folder / path.relative_to(aside))
            shutil.rmtree(aside)
    except OSError as error:
        raise SystemFault(
            str(aside), f"cannot be put back: {error.strerror}"
        ) from error
