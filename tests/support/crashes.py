"""Processes that die: work in a child that is killed at its k-th file-system event, and
what is on the disk then.
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.forks import fork
from tests.support.runs import log, train

WRITES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "shutil.",
)
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
NOT_COMPARED = (
    ".dstrain.lock",
    ".dstrain.lock.pid",
    "config.json",
    "loss.csv",
    "logs/state.json",
    "loss.jsonl",
    "dstrain.log",
)
"""config.json holds --resume; loss.csv is compared without what depends on the clock;
logs/state.json says when and where a run was.
"""


def events(body: Callable[[], object], below: Path) -> int:
    """How many file-system events that change something below a folder `body` has; it
    runs in a child.
    """
    killed, seen = _in_child(body, -1, below, torn=False)
    assert not killed
    return seen


def killed_at(
    event: int, body: Callable[[], object], below: Path, torn: bool = False
) -> bool:
    """Run `body` in a child that is killed at its event number `event` (from 0); return
    whether it was.

    torn: where the event is the opening of a file for writing, the file is then there,
    and empty.
    """
    return _in_child(body, event, below, torn)[0]


def _in_child(
    body: Callable[[], object], event: int, below: Path, torn: bool
) -> tuple[bool, int]:
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        seen = 0

        def look(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            opens = (
                name == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & CHANGING
            )
            place: Any = arguments[0] if arguments else None
            # A folder is opened to be synced: after a rename, and before what follows
            # it.
            syncs = (
                name == "open"
                and isinstance(place, str | os.PathLike)
                and os.path.isdir(place)
            )
            changes = (opens or syncs or name.startswith(WRITES)) and isinstance(
                place, str | os.PathLike
            )
            inside = (
                name in ("os.remove", "os.rmdir") and arguments[-1] != -1
            )  # of a folder that is held open
            if changes and (inside or str(below) in os.fspath(place)):
                seen += 1
                if seen == event + 1:
                    if opens and torn:
                        with suppress(OSError):  # as the opening itself would raise
                            os.close(os.open(place, arguments[2], 0o666))
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(look)
            body()
            status = 0
        except BaseException:  # which pytest, in the parent, could not show
            traceback.print_exc()
            raise
        finally:
            os.write(writing, str(seen).encode())
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, "the child failed"
    return os.WIFSIGNALED(status), int(answer or -1)


def again(project: Path, out: Path, flags: dict[str, Any]) -> Path:
    """The same command again, whatever the folder holds: with --resume."""
    return train(project, output_path=out, resume="auto", **flags)


def everything(folder: Path) -> dict[str, Any]:
    """All that a run left: the sha256 of each file, and its log."""
    paths = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and {path.name, f"{path.parent.name}/{path.name}"}.isdisjoint(NOT_COMPARED)
    )
    digests = {
        str(path.relative_to(folder)): sorted(json.loads(path.read_bytes())["files"])
        if path.name == "run.json"  # whatever the order
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }
    return digests | {"log": log(folder)}
