"""Hold folders and files for one process alone, by locks of the operating system, which end
with the process, however it dies.

Who holds one stands in a file, for messages. Where the file system has no locks, as NFS
without its lock service, some FUSE and Lustre mounts, a warning says so.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG

from filelock import FileLock, Timeout

from dstrain.console import get_logger
from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import UNTOUCHED, refuse_link, write_fault
from dstrain.storage.temporaries import process_exists

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


logger = get_logger(__name__)
LOCK = ".dstrain.lock"
HOLDER = ".dstrain.lock.pid"
"""Says which process holds the lock; removed before the lock is released."""
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What the system answers where a file system has no locks."""
ORPHANS = 10.0
"""Seconds for which loader processes of a killed run may outlive it, with its lock."""


class FolderLock:
    """The lock of a folder that exists, to be acquired and released."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Not its own fallback: a mark that it leaves on NFS is never taken over.
        self._lock = FileLock(folder / LOCK, fallback_to_soft=False)

    def acquire(self, timeout: float) -> bool:
        """Acquire it, waiting for at most so many seconds; return whether it is held.

        Raises StateError for a file in its place that is somebody else's, OSError.
        """
        check_own(self.folder)
        try:
            self._lock.acquire(timeout=timeout)
        except Timeout:
            return False
        except OSError as error:
            _warn_if_unsupported(self.folder, error)
        say_holder(self.folder / HOLDER)
        return True

    def release(self) -> None:
        """Let others have it."""
        with suppress(OSError):
            (self.folder / HOLDER).unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone, creating it if needed; one that was created
    and stays empty is removed again.

    Raises StateError naming the process that holds it, or a file in the place of the lock's
    that is somebody else's; SystemFault if the folder cannot be written.
    """
    folder_lock = FolderLock(folder)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        before = read_holder(folder / HOLDER)
        is_orphaned = (
            before is not None
            and before.host == socket.gethostname()
            and not process_exists(before.process_id)
        )
        if not folder_lock.acquire(ORPHANS if is_orphaned else 0):
            who = read_holder(folder / HOLDER) or "another process"
            advice = "wait for it to end, or use another folder"
            raise StateError(folder, f"is in use by {who}", advice)
    except FileExistsError as error:
        what = "is a file; expected a folder"
        raise SystemFault(folder, what, UNTOUCHED) from error
    except OSError as error:
        raise write_fault(folder / LOCK, 0, error) from error
    try:
        with folder_lock:
            yield
    finally:
        # Whoever takes it now says so there, and so it stays.
        with suppress(OSError):
            if made and {*os.listdir(folder)} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                for one in made:
                    one.rmdir()


@contextmanager
def held_file(path: Path) -> Iterator[None]:
    """Hold a file that says so and is made for it; it goes at the end. Raises OSError."""
    file_lock = FileLock(path, fallback_to_soft=False)
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock.acquire(timeout=ORPHANS))
            except OSError as error:
                _warn_if_unsupported(path.parent, error)
            say_holder(path)
            yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Return whether a process holds a file that is there, as far as can be seen; one of
    an earlier version, which wrote when it started, holds none but touches it.
    """
    with suppress(OSError):
        if (
            time.time() < path.stat().st_mtime + 600
            and b'"started"' in path.read_bytes()
        ):
            return True
    try:
        with FileLock(path, fallback_to_soft=False).acquire(timeout=0):
            return False
    except OSError as error:
        # Of another user, who may have been killed. Windows has no fcntl.
        if sys.platform != "win32" and error.errno not in UNSUPPORTED:
            with suppress(OSError), path.open("rb") as file:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        return True  # held, or of a file system without locks


def check_own(folder: Path) -> None:
    """Raise StateError for a file in the place of a lock's that this module cannot have
    written: it would be replaced.
    """
    refuse_foreign(folder / LOCK, 0)
    refuse_foreign(folder / HOLDER)


def _warn_if_unsupported(folder: Path, error: OSError) -> None:
    if error.errno not in UNSUPPORTED:
        raise error
    what = "its file system has no locks: use it from one process at a time"
    logger.warning(f"{folder}: {what}")
