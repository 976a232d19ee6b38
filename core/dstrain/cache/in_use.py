"""Say who reads and who writes a feature cache, so that nothing is removed under them.

    .reading-HOST-PROCESS-ID.json    the mark of a process that reads the cache
    .removing.json                   the mark of the process that removes values

The one who writes has the lock of the folder. A reader takes no lock: values are only
added while it reads, and its mark keeps `exclusive` from beginning.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from dstrain.cache.store import MARKER
from dstrain.errors import StateError
from dstrain.storage.locks import holder, lock, refuse_foreign
from dstrain.storage.marks import (
    Mark,
    is_alive,
    kept_alive,
    read_mark,
    remove_mark,
    write_mark,
)

READING = ".reading-"
"""How the names of readers' marks begin."""
REMOVING = ".removing.json"


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say inside that this process reads the cache; it ends with the process, however it
    dies.

    A folder that cannot be written gets no mark, and can be read all the same: who
    removes values should do it as long as nobody reads. Raises StateError while another
    process removes values.
    """
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())[:100]
    path = folder / f"{READING}{host}-{os.getpid()}-{uuid4().hex[:8]}.json"
    with ExitStack() as stack:
        # A folder of something else gets no file.
        if (folder / MARKER).exists():
            with suppress(OSError):
                stack.enter_context(kept_alive(path, write_mark(path)))
        # After the mark, as `exclusive` looks for marks after it has made its own: at
        # least one of the two sees the other.
        _refuse_removal(folder)
        yield


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a cache alone inside, so that values may be removed: nobody reads or writes it.

    Raises StateError naming a process that does; SystemFault if the folder cannot be
    written.
    """
    with lock(folder):
        remove_dead_marks(folder)
        path = folder / REMOVING
        with kept_alive(path, write_mark(path)):
            for mark in readers(folder):
                raise StateError(
                    folder,
                    f"is being read by {mark}",
                    "wait for it to end, then run the same command again",
                )
            yield


def readers(folder: Path) -> list[Mark]:
    """Return the living processes that read a cache, on all machines that share it."""
    marks = _marks(folder, READING)
    # One that is just being made will find that values are removed, and refuse to read.
    return [mark for path, mark in marks if mark is not None and is_alive(path, mark)]


def writer(folder: Path) -> Mark | None:
    """Return the living process that writes to a cache, None if there is none."""
    return holder(folder)


def remove_dead_marks(folder: Path) -> None:
    """Remove the marks of processes that were killed; the caller holds the lock.

    Raises StateError for a file in the place of a mark that is somebody else's.
    """
    refuse_foreign(folder / REMOVING)
    # Who made it had the lock, which is the caller's now.
    (folder / REMOVING).unlink(missing_ok=True)
    for path, mark in _marks(folder, READING):
        if not is_alive(path, mark):
            remove_mark(path, mark)


def _refuse_removal(folder: Path) -> None:
    for path, mark in _marks(folder, REMOVING):
        if is_alive(path, mark):
            raise StateError(
                folder,
                f"values are being removed from it by {mark or 'another process'}",
                "wait for it to end, then run the same command again",
            )


def _marks(folder: Path, beginning: str) -> Iterator[tuple[Path, Mark | None]]:
    """Yield the marks whose names begin so, None for what is just being made, and not
    files of others that have the name.
    """
    for path in sorted(folder.glob(f"{beginning}*")):
        with suppress(ValueError, OSError):
            if not path.is_symlink():
                yield path, read_mark(path)
