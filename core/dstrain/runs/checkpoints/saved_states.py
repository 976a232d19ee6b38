"""Find the newest state that is whole, and remove old ones."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.console import get_logger
from dstrain.errors import StateError
from dstrain.runs.checkpoints.directory import (
    EMA,
    FILES,
    RECORD,
    STATE_FILES,
    STATES,
    states,
    step_of,
)
from dstrain.storage import sha256
from dstrain.storage.whole_folders import remove_folder

logger = get_logger(__name__)

FORMAT = MappingProxyType({"format": "dstrain-state", "version": 1})


def saved_facts(folder: Path) -> Mapping[str, Any]:
    """Read what a state has beside tensors, whose files are not looked at; nothing where
    that is damaged or missing.
    """
    path = folder / "state.json"
    try:
        digest = json.loads((folder / RECORD).read_bytes())["sha256"][path.name]
        if sha256(path) != digest:
            return {}
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return facts


def damage(folder: Path) -> str:
    """Say why a state cannot be used, or return '' when its record and every digest
    agree.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
        digests = record.pop("sha256")
        if record != FORMAT or digests.keys() - {EMA} != {*FILES}:
            return f"{RECORD} is of another format: {record}"
        wrong = [name for name in digests if sha256(folder / name) != digests[name]]
    except FileNotFoundError as error:
        return f"is incomplete: {Path(error.filename).name} is missing"
    except Exception as error:  # a damaged one may be anything
        return f"{RECORD} cannot be used: {error!r}"
    if wrong:
        return f"is damaged: the sha256 of {', '.join(wrong)} is not the recorded one"
    return ""


def newest_state(output: Path) -> Path:
    """Return the newest state that is whole, with a warning for each that is passed
    over.

    Raises StateError when there is none.
    """
    for folder in states(output):
        reason = damage(folder)
        if not reason:
            return folder
        logger.warning(f"skipped: {folder}: {reason}")
    raise StateError(
        output,
        "contains no intact state to resume from",
        "put back an intact one, or start over with --overwrite in place of --resume",
    )


def prune_states(output: Path, keep: int, step: int, listed: Collection[str]) -> None:
    """Remove what is older than the newest `keep` states up to this step, but no other
    files in their folders, and no folder that is a link.

    A state beyond the step is one that could not be loaded.

    listed: Paths below `output` that runs wrote. Only states made of these count.
    """
    done = []
    for folder in states(output):
        files = {path.name for path in folder.iterdir()}.intersection(STATE_FILES)
        paths = {f"{STATES}/{folder.name}/{name}" for name in files}
        if step_of(folder) <= step and paths <= {*listed} and not folder.is_symlink():
            done.append(folder)
    for folder in done[keep:]:
        if {path.name for path in folder.iterdir()} <= {*STATE_FILES}:
            # The folder loses its name first, so that no half of a state is ever seen.
            remove_folder(folder)
            continue
        for name in STATE_FILES:
            (folder / name).unlink(missing_ok=True)
