"""The output folder of a run: where its files are, and which of them a run wrote. Nothing
here imports torch, so that a folder that is in the way is refused at once.
"""

import os
import re
from pathlib import Path, PurePath

from dstrain.config import CONFIG
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_records import records
from dstrain.errors import StateError
from dstrain.runs.launch.variables import world_size
from dstrain.storage import BAD_SAMPLES, RUN, RunFiles, lock
from dstrain.storage.files import refuse_link
from dstrain.storage.locks import LOCK
from dstrain.storage.run_files import not_listed, remove_empty
from dstrain.storage.whole_folders import finish_replacing

FILES = ("trainable.safetensors", "optimizer.safetensors", "state.json")
EMA = "ema.safetensors"
"""The file of a state that only a run with an average has."""
RECORD = "record.json"
STATE_FILES = (RECORD, *FILES, EMA)
"""Every file that a state may have."""
STATES = "states"
NAME = re.compile(r"step-\d+")

LOSS_CSV = "logs/loss.csv"
LOSS_JSONL = "logs/loss.jsonl"
VALIDATION_CSV = "logs/validation.csv"
VALIDATION_JSONL = "logs/validation.jsonl"
STATUS = "logs/state.json"
LOG = "logs/dstrain.log"
SKIPPED_ROWS = f"logs/{BAD_SAMPLES}"
SET_ASIDE = ".overwritten"
"""Folder of the run that --overwrite replaces, until the new one has saved."""
WRITTEN = (
    RUN,
    CONFIG,
    LOSS_CSV,
    LOSS_JSONL,
    VALIDATION_CSV,
    VALIDATION_JSONL,
    STATUS,
    LOG,
    SKIPPED_ROWS,
    "epoch-*.safetensors",
    "step-*.safetensors",
    *(f"{STATES}/step-*/{name}" for name in STATE_FILES),
)
"""Patterns of what a run may write, beside what its plugins write."""


def written() -> tuple[str, ...]:
    """Return the patterns of what a run may write, those of plugins included."""
    return (*WRITTEN, *(one for record in records() for one in record.writes))


def states(output: Path) -> list[Path]:
    """Return the state folders of an output folder, newest first, intact or not."""
    found = []
    for path in output.glob(f"{STATES}/*"):
        # A folder of this name without any of the files is not a state.
        has_files = any((path / name).exists() for name in STATE_FILES)
        if NAME.fullmatch(path.name) and has_files:
            found.append(path)
    return sorted(found, key=step_of, reverse=True)


def step_of(state: Path) -> int:
    """Return the step after which a state was saved."""
    return int(state.name.removeprefix("step-"))


def refuse_run(folder: Path) -> None:
    """Raise StateError if the folder holds a run: states, weights, a run that was set
    aside, or a log with a step.
    """
    files = RunFiles.read(folder)
    paths = [folder / path for path in (*files.weights(), f"{SET_ASIDE}/{RUN}")]
    log = folder / LOSS_CSV
    if LOSS_CSV in files.steps and log.is_file() and log.read_bytes().count(b"\n") > 1:
        paths.append(log)
    kept = states(folder)
    for found in (*kept, *filter(Path.exists, paths)):
        resume = "resume it with --resume, " if kept else ""
        what = f"already contains a run: {found.relative_to(folder)}"
        advice = f"{resume}start over with --overwrite, or give another --output_path"
        raise StateError(folder, what, advice)


def refuse_unlisted(folder: Path) -> None:
    """Raise StateError for a file that is in the way of the run's and is not listed."""
    listed = RunFiles.read(folder).steps
    for pattern in written():
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            if name not in listed:
                raise not_listed(folder, name)


def check_start(config: TrainConfig, folder: Path) -> None:
    """Refuse, before any work, an output folder that this run cannot start in.

    Raises StateError for a run that is neither to be resumed nor overwritten, and for
    one that lost its states. One that saved none starts over, so that a job script is
    one command.
    """
    if config.resume is None:
        if not config.overwrite:
            refuse_run(folder)
    elif config.resume != "auto":
        path = Path(config.resume)
        if not (path / RECORD).exists():
            advice = "--resume takes auto, or a folder states/step-STEP of a run"
            raise StateError(path, "is not a state folder", advice)
    elif not states(folder) and RunFiles.read(folder).committed:
        what = f"contains no checkpoint, although {RUN} records that one was saved"
        raise StateError(
            folder, what, "start over with --overwrite in place of --resume"
        )


def check_way(folder: Path) -> None:
    """Refuse files in the way that no run wrote; raises StateError."""
    # A run that is still going says so before what it wrote is in the way.
    if (folder / LOCK).exists():
        with lock(folder):
            finish_replacing(folder / STATES)
            _put_back(folder)
    refuse_unlisted(folder)
    aside = folder / SET_ASIDE
    refuse_link(aside)
    if aside.is_file():
        raise not_listed(folder, SET_ASIDE)
    refuse_unlisted(aside)


def refuse_early(config: TrainConfig) -> None:
    """Refuse an output folder that a run of one process cannot start in, as the run itself
    will, before it imports what takes seconds.
    """
    writes = config.stage != "data_process" and not config.dry_run
    if writes and config.output_path is not None and world_size(os.environ) == 1:
        check_way(config.output_path)
        check_start(config, config.output_path)


def set_run_aside(folder: Path) -> None:
    """Move the files of the run that the folder holds to a folder in it, each on its disk.

    Their list is moved first, and back last: `_put_back` undoes what was interrupted. A run
    that saved nothing after it set another aside is removed in place of that. Raises
    StateError for a file of the user's in its place.
    """
    listed = RunFiles.read(folder)
    if not listed.steps:
        return
    aside = folder / SET_ASIDE
    refuse_link(aside)
    if (aside / RUN).exists() and not listed.committed:
        _remove(folder, {name: folder / name for name in _written(listed)})
        return
    remove_set_aside(folder)
    places = _places_aside(folder, listed)
    for place in filter(os.path.lexists, places.values()):
        raise not_listed(folder, place.relative_to(folder).as_posix())
    for name in sorted(places, key=RUN.__ne__):
        _move(folder, folder / name, places[name])


def remove_set_aside(folder: Path) -> None:
    """Remove the run that was set aside, but nothing else there."""
    aside = folder / SET_ASIDE
    if not aside.is_symlink():
        _remove(folder, _places_aside(folder, RunFiles.read(aside)))


def _put_back(folder: Path) -> None:
    """Put back a run that was being set aside, or whose successor did not begin."""
    aside = folder / SET_ASIDE
    if aside.is_symlink() or (folder / RUN).exists():
        return
    places = _places_aside(folder, RunFiles.read(aside))
    for name in sorted(places, key=RUN.__eq__):
        if places[name].is_file() and os.path.lexists(folder / name):
            raise not_listed(folder, name)
        _move(folder, places[name], folder / name)


def _places_aside(folder: Path, files: RunFiles) -> dict[str, Path]:
    """Return where the files of a run are set aside: on the same disk, where a folder of
    the run is a link to another one.
    """
    places = {}
    for name in _written(files):
        path = folder / name
        base = next(
            one
            for one in path.parents
            if one == folder or one.is_symlink() or os.path.ismount(one)
        )
        places[name] = base / SET_ASIDE / path.relative_to(base)
    return places


def _move(folder: Path, path: Path, place: Path) -> None:
    if path.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
        remove_empty(path.parent, folder)


def _remove(folder: Path, places: dict[str, Path]) -> None:
    for name in sorted(places, key=RUN.__eq__):  # the list goes last
        if places[name].is_file():
            places[name].unlink()
            remove_empty(places[name].parent, folder)


def _written(files: RunFiles) -> list[str]:
    """Return what is listed and has a name that runs write; others may be a stranger's."""
    patterns = [PurePath(one) for one in written()]
    return [
        name
        for name in files.steps
        if any(_matches(PurePath(name), pattern) for pattern in patterns)
    ]


def _matches(path: PurePath, pattern: PurePath) -> bool:
    # `match` alone would compare the last parts only.
    return len(path.parts) == len(pattern.parts) and path.match(str(pattern))
