"""Say who reads and who writes a feature cache, so that nothing is removed under them.

    .reading-HOST-PROCESS-HEX.json   is held by a process that reads the cache
    .removing.json                   is held by the process that removes values

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

from filelock import FileLock

from dstrain.cache.backend.index import is_cache
from dstrain.errors import StateError
from dstrain.storage import lock
from dstrain.storage.files import write_fault
from dstrain.storage.locks import (
    Holder,
    held_file,
    is_held,
    read_holder,
    refuse_foreign,
)

READING = ".reading-"
"""How the names of readers' marks begin."""
REMOVING = ".removing.json"
NAMES = re.compile(r"\.removing\.json|\.reading-[\w.-]+-\d+-[0-9a-f]{8}\.json")
"""Names of marks: a file of another name is somebody else's."""
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""What the system answers where a process may not write."""


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
        if is_cache(folder):
            try:
                stack.enter_context(held_file(path))
            except OSError as error:
                if error.errno not in READ_ONLY:
                    raise write_fault(path, 0, error) from error
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
            stack.enter_context(held_file(path))
        except OSError as error:
            raise write_fault(path, 0, error) from error
        _refuse(folder, READING, "is being read by")
        yield


def readers(folder: Path) -> list[Holder | None]:
    """Return the living processes that read a cache, on all machines that share it; None
    for one that is not known.
    """
    return [who for path, who in _marks(folder, READING) if is_held(path)]


def remove_dead_marks(folder: Path) -> None:
    """Remove the marks of processes that were killed; the caller holds the lock.

    Raises StateError for a file in the place of a mark that is somebody else's.
    """
    refuse_foreign(folder / REMOVING)
    # Who made it had the lock, which is the caller's now.
    (folder / REMOVING).unlink(missing_ok=True)
    for path, _ in _marks(folder, READING):
        # What names nobody is somebody else's file, and stays.
        with suppress(ValueError, OSError):
            read_holder(path)
            if is_held(path):
                continue
            # Held as it goes: a reader that has just made it sees that, and makes another.
            with FileLock(path, fallback_to_soft=False).acquire(timeout=0):
                path.unlink()


def _refuse(folder: Path, beginning: str, what: str) -> None:
    """Raise StateError if a process with such a mark lives."""
    for path, who in _marks(folder, beginning):
        if is_held(path):
            raise StateError(
                folder,
                f"{what} {who or 'an unknown process'}",
                f"its mark is {path.name}",
                "wait for it to end, then run the same command again",
            )


def _marks(folder: Path, beginning: str) -> Iterator[tuple[Path, Holder | None]]:
    """Yield the marks whose names begin so, with whom they name, None for one that cannot be
    read: it is just being made, another user's, or none.
    """
    for path in sorted(folder.glob(f"{beginning}*")):
        is_mark = NAMES.fullmatch(path.name) is not None
        if is_mark and path.is_file() and not path.is_symlink():
            who = None
            with suppress(ValueError, OSError):
                who = read_holder(path)
            yield path, who
