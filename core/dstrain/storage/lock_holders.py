"""Say in a file which process holds a folder or a file, and read it."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG

from dstrain.errors import StateError
from dstrain.storage.files import refuse_link

MOST_BYTES = 1024
"""What says who holds something is shorter."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder or a file."""

    host: str
    process_id: int

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"


def refuse_foreign(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Raise StateError for a link, and for a file that is neither empty nor names a holder."""
    refuse_link(path)
    try:
        stat = path.stat()
        is_own = S_ISREG(stat.st_mode) and stat.st_size <= most_bytes
        # Windows refuses to read a file that is locked; an empty one names nobody.
        if is_own and stat.st_size:
            read_holder(path)
    except FileNotFoundError:
        return
    except ValueError:
        is_own = False
    if not is_own:
        what = f"contains {path.name}, which dstrain did not write"
        advice = "move it away, or use another folder"
        raise StateError(path.parent, what, advice)


def read_holder(path: Path) -> Holder | None:
    """Return the process that a file names; None for no file, and one that is just made.

    Raises ValueError for a file of another kind, OSError.
    """
    content = b""
    with suppress(FileNotFoundError), path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if not content:
        return None
    try:
        found = json.loads(content)
        return Holder(str(found["host"]), int(found["process_id"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} names no process") from error


def say_holder(path: Path) -> None:
    """Write to a file that this process holds who it is, where that is possible: on a full
    disk the lock holds all the same.
    """
    holder = Holder(socket.gethostname(), os.getpid())
    try:
        path.write_text(json.dumps(asdict(holder)), "utf-8")
    except OSError:
        with suppress(OSError):
            os.truncate(path, 0)
