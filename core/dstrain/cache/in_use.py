"""Say who reads and who writes a feature cache, so that nothing is removed under them.

    .reading-HOST-PROCESS-HEX.json   the mark of a process that reads the cache
    .removing.json                   the mark of the process that removes values

The one who writes has the lock of the folder. A reader takes no lock: values are only
added while it reads, and its mark keeps `exclusive` from beginning.
"""

import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from dstrain.cache.store import MARKER
from dstrain.errors import StateError
from dstrain.storage import lock
from dstrain.storage.locks import holder, mark_fault, refuse_foreign
from dstrain.storage.marks import (
    Mark,
    is_alive,
    kept_alive,
    read_mark,
    remove_mark,
    unknown,
    write_mark,
)

READING = ".reading-"
"""How the names of readers' marks begin."""
REMOVING = ".removing.json"
NAMES = re.compile(r"\.removing\.json|\.reading-[\w.-]+-\d+-[0-9a-f]{8}\.json")
"""Names of marks: a file of another name is somebody else's."""
READ_ONLY = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM}
    | {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""What the system answers where a process may not write, or a file system cannot."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say inside that this process reads the cache; it ends with the process, however it
    dies.

    A folder in which this process cannot write gets no mark, and can be read all the
    same: who removes values should do it as long as nobody reads. Raises StateError while
    another process removes values; SystemFault if the mark cannot be written for another
    reason.
    """
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())[:100]
    path = folder / f"{READING}{host}-{os.getpid()}-{uuid4().hex[:8]}.json"
    with ExitStack() as stack:
        # A folder of something else gets no file.
        if (folder / MARKER).exists():
            try:
                stack.enter_context(kept_alive(path, write_mark(path)))
            except OSError as error:
                if error.errno not in READ_ONLY:
                    raise mark_fault(path, error) from error
        # After the mark, as `exclusive` looks for marks after it has made its own: at
        # least one of the two sees the other.
        _refuse(folder, REMOVING, "values are being removed from it by")
        yield


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a cache alone inside, so that values may be removed: nobody reads or writes it.

    Raises StateError naming a process that does; SystemFault if the folder cannot be
    written.
    """
    with lock(folder), ExitStack() as stack:
        remove_dead_marks(folder)
        path = folder / REMOVING
        try:
            stack.enter_context(kept_alive(path, write_mark(path)))
        except OSError as error:
            raise mark_fault(path, error) from error
        _refuse(folder, READING, "is being read by")
        yield


def readers(folder: Path) -> list[Mark]:
    """Return the living processes that read a cache, on all machines that share it."""
    return [mark for _, mark in _living(folder, READING)]


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
        # What is no mark is somebody else's file, and stays.
        with suppress(ValueError, OSError):
            if not is_alive(path, mark):
                remove_mark(path, mark)


def _refuse(folder: Path, beginning: str, what: str) -> None:
    """Raise StateError if a process with such a mark lives."""
    for path, mark in _living(folder, beginning):
        raise StateError(
            folder,
            f"{what} {mark}",
            f"its mark is {path.name}",
            "wait for it to end, then run the same command again",
        )


def _living(folder: Path, beginning: str) -> Iterator[tuple[Path, Mark]]:
    """Yield the marks of living processes whose names begin so."""
    for path, mark in _marks(folder, beginning):
        if is_alive(path, mark):
            yield path, mark or unknown(path.name)


def _marks(folder: Path, beginning: str) -> Iterator[tuple[Path, Mark | None]]:
    """Yield the marks whose names begin so, None for one that cannot be read: it is just
    being made, another user's, of another version of dstrain, or none.
    """
    for path in sorted(folder.glob(f"{beginning}*")):
        is_mark = NAMES.fullmatch(path.name) is not None
        if is_mark and path.is_file() and not path.is_symlink():
            mark = None
            with suppress(ValueError, OSError):
                mark = read_mark(path)
            yield path, mark
