"""Tell faults of the machine from damage of a file: only the latter makes a row bad."""

import errno
from pathlib import Path

from dstrain.errors import OutOfMemory, StateError, SystemFault
from dstrain.storage import file_mark
from dstrain.storage.hashing import FileMark

OF_THE_FILE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        # FFmpeg's decoders return it, as -1, for damage.
        errno.EPERM,
    }
)
"""Numbers of system errors that speak of the file or its name, not of the machine."""
AMBIGUOUS = frozenset({errno.EIO, errno.EAGAIN, errno.ENOSYS, errno.ERANGE, errno.EDOM})
"""Numbers that FFmpeg also uses for damage."""


def raise_system_fault(path: str | Path, error: BaseException) -> None:
    """Raise SystemFault or OutOfMemory in place of an error that says nothing of the
    file: too many open files, no permission, a failing disk, no memory.

    Return for any other error, which a decoder raised because of the file's content.
    """
    if isinstance(error, MemoryError):
        raise OutOfMemory(
            path,
            "there is no memory to read it",
            "lower --dataset_num_workers, or close other programs",
        ) from error
    number = getattr(error, "errno", None)
    # Decoders have numbers of their own, and errors without one.
    if number not in errno.errorcode or number in OF_THE_FILE:
        return
    if number in AMBIGUOUS and not isinstance(error, OSError):
        return
    raise SystemFault(
        path,
        f"cannot be read: {getattr(error, 'strerror', None) or error}",
        "this is a fault of the machine, not of the file: no row is skipped for it",
    ) from error


def check_unchanged(path: str | Path, mark: FileMark) -> None:
    """Raise StateError for a file whose size or time of content was another one; one
    that is gone passes, since whoever opens it says so.
    """
    try:
        # The rest of a mark changes with the file's entry, too, such as its permissions.
        if file_mark(path)[:2] == mark[:2]:
            return
    except OSError as error:
        raise_system_fault(path, error)
        return
    raise StateError(
        path,
        "changed after the run had inspected it",
        "leave a dataset as it is while a run uses it, and run the same command again",
    )


def check_readable(path: Path) -> None:
    """Read a file's bytes; raises SystemFault if the machine cannot."""
    try:
        with path.open("rb") as file:
            while file.read(2**20):
                pass
    except OSError as error:
        raise_system_fault(path, error)
