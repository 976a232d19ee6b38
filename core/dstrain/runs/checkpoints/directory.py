"""The output folder of a run: where its files are, and the list of those it wrote."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path, PurePath

from dstrain.config import CONFIG
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import records
from dstrain.errors import StateError
from dstrain.runs.checkpoints.state_folders import (
    RECORD,
    STATE_FILES,
    STATES,
    states,
)
from dstrain.runs.launch.variables import world_size
from dstrain.storage import BAD_SAMPLES, RUN, RunFiles, lock, temporary
from dstrain.storage.files import finish_replacing, temporaries
from dstrain.storage.locks import LOCK
from dstrain.storage.run_files import not_listed, remove_empty

LOSS_CSV = "logs/loss.csv"
LOSS_JSONL = "logs/loss.jsonl"
VALIDATION_CSV = "logs/validation.csv"
VALIDATION_JSONL = "logs/validation.jsonl"
STATUS = "logs/state.json"
LOG = "logs/dstrain.log"
SKIPPED_ROWS = f"logs/{BAD_SAMPLES}"
SET_ASIDE = ".overwritten"
"""Folder of the files that --overwrite is removing."""
WRITTEN = (
    SET_ASIDE,
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


def run_in(folder: Path) -> list[Path]:
    """Return what says that a folder holds a run: states, newest first, weights, a log.

    A log counts from its first step on; without one the run ended before it began.
    """
    files = RunFiles.read(folder)
    paths = [folder / path for path in files.weights()]
    log = folder / LOSS_CSV
    if LOSS_CSV in files.steps and log.is_file() and log.read_bytes().count(b"\n") > 1:
        paths.append(log)
    return [*states(folder), *(path for path in paths if path.exists())]


def refuse_run(folder: Path) -> None:
    """Raise StateError if the folder holds a run, naming the ways to resume or replace it."""
    found = run_in(folder)
    if not found:
        return
    resume = "resume it with --resume, " if states(folder) else ""
    raise StateError(
        folder,
        f"already contains a run: {found[0].relative_to(folder)}",
        f"{resume}start over with --overwrite, or give another --output_path",
    )


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
            advice = (
                "--resume takes auto, or a folder states/step-STEP of an earlier run"
            )
            raise StateError(path, "is not a state folder", advice)
    elif not states(folder) and RunFiles.read(folder).committed:
        raise StateError(
            folder,
            f"contains no checkpoint, although {RUN} records that one was saved",
            f"put its folder {STATES} back, or start over with --overwrite in place of --resume",
        )


def put_back(folder: Path) -> None:
    """Put back what an interrupted run moved, and refuse files in the way that no run
    wrote; raises StateError.
    """
    # A run that is still going says so before what it wrote is in the way.
    if (folder / LOCK).exists():
        with lock(folder):
            restore_run(folder)
    refuse_unlisted(folder)


def refuse_early(config: TrainConfig) -> None:
    """Refuse an output folder that a run of one process cannot start in, as the run itself
    will, before it imports what takes seconds.
    """
    writes = config.stage != "data_process" and not config.dry_run
    if writes and config.output_path is not None and world_size(os.environ) == 1:
        put_back(config.output_path)
        check_start(config, config.output_path)


def remove_run(folder: Path) -> None:
    """Remove the run that the folder holds: all of it, or, if interrupted, nothing.

    The files are moved aside one by one. The run is gone once their folder gets the
    name of a temporary, which `remove_leftovers` removes. Files on another disk, such as
    those of a linked folder of states, cannot be moved: they are removed after that.
    """
    aside = folder / SET_ASIDE
    try:
        aside.mkdir()
        # The list is moved first, and back last: it marks the folder as the run's.
        for name in (RUN, *_written(RunFiles.read(folder))):
            path = folder / name
            if path.is_file():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.rename(aside / name)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    continue
                remove_empty(path.parent, folder)
        doomed = temporary(folder / "overwritten")
        shutil.rmtree(doomed, ignore_errors=True)
        aside.rename(doomed)
    except BaseException:
        restore_run(folder)
        raise
    _remove_rest(folder, doomed)


def _remove_rest(folder: Path, doomed: Path) -> None:
    """Remove the files of a removed run that could not be moved to its folder."""
    for name in _written(RunFiles.read(doomed)):
        path = folder / name
        if path.is_file() and not (doomed / name).exists():
            path.unlink()
            remove_empty(path.parent, folder)


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


def restore_run(folder: Path) -> None:
    """Undo a `remove_run` that was interrupted, or complete it if the run is gone, and
    complete the replacement of states; the caller holds the folder's lock.

    Files in a folder of that name without run.json are the user's. Raises StateError for
    a file in the place of one to put back.
    """
    for doomed in temporaries(folder):
        _remove_rest(folder, doomed)
    finish_replacing(folder / STATES)
    aside = folder / SET_ASIDE
    if aside.is_symlink():
        return
    names = _written(RunFiles.read(aside))
    for name in sorted(names, key=RUN.__eq__):
        path = aside / name
        place = folder / name
        if path.is_file():
            if place.exists():
                raise not_listed(folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
    # The folders are made before the files are moved into them: some may be empty.
    for path in (*sorted(aside.rglob("*"), reverse=True), aside):
        with suppress(OSError):  # a file of the user, or a folder with one
            path.rmdir()
