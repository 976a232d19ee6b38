"""Hold a folder for one process alone.

`LOCK` is locked by the operating system, which ends that lock with the process, however it
dies. `HOLDER` is a mark of who holds the folder. Where the file system has no locks, as NFS
without its lock service, some FUSE and Lustre mounts, the mark alone keeps others out, and
a warning says so.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from filelock import FileLock, Timeout

from dstrain.console import get_logger
from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import UNTOUCHED, refuse_link, write_fault
from dstrain.storage.marks import (
    FULL,
    MOST_BYTES,
    Mark,
    is_alive,
    kept_alive,
    read_mark,
    write_mark,
)

logger = get_logger(__name__)

LOCK = ".dstrain.lock"
HOLDER = ".dstrain.lock.pid"
"""The mark of the process that holds the lock; removed before the lock is released."""
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What the system answers where a file system has no locks."""
ORPHANS = 10.0
"""Seconds for which the loader processes of a killed run may outlive it and keep its
lock."""


class FolderLock:
    """The lock of a folder that exists, to be acquired and released."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = ExitStack()

    def acquire(self, timeout: float) -> bool:
        """Acquire it, waiting for at most so many seconds; return whether it is held.

        Raises StateError for a file in its place that is somebody else's, OSError.
        """
        check_own(self.folder)
        # Not its own fallback: a mark that it leaves on NFS is never taken over.
        file_lock = FileLock(self.folder / LOCK, fallback_to_soft=False)
        mark = self.folder / HOLDER
        with ExitStack() as stack:
            try:
                file_lock.acquire(timeout=timeout)
                stack.callback(file_lock.release)
            except Timeout:
                return False
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                if mark.exists() and is_alive(mark, _read(mark)):
                    return False
                what = "its file system has no locks: use it from one machine at a time"
                logger.warning(f"{self.folder}: {what}")
            # Of a process that is dead.
            mark.unlink(missing_ok=True)
            try:
                stack.enter_context(kept_alive(mark, write_mark(mark)))
            except FileExistsError:  # without locks, another process was as quick
                return False
            self._held = stack.pop_all()
        return True

    def release(self) -> None:
        """Let others have it."""
        self._held.close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone, creating it if needed; one that was created
    and stays empty is removed again.

    The lock ends with the process, however it dies. Raises StateError naming the process
    that holds it, or a file in the place of the lock's that is somebody else's;
    SystemFault if the folder cannot be written.
    """
    folder_lock = FolderLock(folder)
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        # A holder that is dead left orphans, which will soon release the lock.
        before = _read(folder / HOLDER)
        is_orphaned = before is not None and not is_alive(folder / HOLDER, before)
        if not folder_lock.acquire(ORPHANS if is_orphaned else 0):
            raise _in_use(folder)
    except FileExistsError as error:
        what = "is a file; expected a folder"
        raise SystemFault(folder, what, UNTOUCHED) from error
    except OSError as error:
        raise mark_fault(folder / LOCK, error) from error
    try:
        with folder_lock:
            yield
    finally:
        # Whoever takes it now has a mark there, and so it stays.
        with suppress(OSError):
            if made and {*os.listdir(folder)} <= {LOCK}:
                (folder / LOCK).unlink(missing_ok=True)
                for one in made:
                    one.rmdir()


def mark_fault(path: Path, error: OSError) -> SystemFault:
    """Return the error for a lock or mark that cannot be written."""
    fault = write_fault(path, 0, error)
    if error.errno not in FULL:
        return fault
    # Creating a file may need a block for its folder, or a free inode.
    advice = "it needs a few kB: remove or move some files there, then run the same command again"
    return SystemFault(fault.where, fault.what, *fault.help_lines, advice)


def holder(folder: Path) -> Mark | None:
    """Return who holds the lock of a folder, as far as can be known; None for nobody.

    Raises StateError for a file in the lock's place that is somebody else's.
    """
    check_own(folder)
    mark = _read(folder / HOLDER)
    return mark if mark is not None and is_alive(folder / HOLDER, mark) else None


def check_own(folder: Path) -> None:
    """Raise StateError for a file in the place of a lock's that this module cannot have
    written: it would be replaced.
    """
    refuse_foreign(folder / LOCK, 0)
    refuse_foreign(folder / HOLDER, MOST_BYTES)


def refuse_foreign(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Raise StateError for a link, and for a file that is neither empty nor a mark."""
    refuse_link(path)
    try:
        stat = path.stat()
        is_own = S_ISREG(stat.st_mode) and stat.st_size <= most_bytes
        # Windows refuses to read a file that is locked; an empty one is no mark anyway.
        if is_own and stat.st_size:
            read_mark(path)
    except FileNotFoundError:
        return
    except ValueError:
        is_own = False
    if not is_own:
        what = f"contains {path.name}, which dstrain did not write"
        advice = "move it away, or use another folder"
        raise StateError(path.parent, what, advice)


def _in_use(folder: Path) -> StateError:
    mark = _read(folder / HOLDER)
    who = "another process" if mark is None else str(mark)
    advice = "wait for it to end, or use another folder"
    return StateError(folder, f"is in use by {who}", advice)


def _read(path: Path) -> Mark | None:
    try:
        return read_mark(path)
    except ValueError:
        # A file that is nobody's mark: `check_own` says so.
        return None
