"""Write files so that they are either complete or absent: under a temporary name, synced
and renamed, then their folder is synced.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from dstrain.errors import StateError, SystemFault, UsageError
from dstrain.storage.temporaries import final, temporary

CONFIG_BYTES = 2**24
"""Bytes of the largest file of options, or configuration of a model."""


def read_limited(path: Path, most_bytes: int = CONFIG_BYTES) -> bytes:
    """Return the bytes of a file that `open_limited` opens; raises as it does."""
    with open_limited(path, most_bytes) as file:
        return file.read()


@contextmanager
def open_limited(path: Path, most_bytes: int) -> Iterator[IO[bytes]]:
    """Open a file that a user names; raises OSError.

    Raises UsageError before reading what is not a regular file, such as a pipe, which
    would never end, and for a file of more than `most_bytes`.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise UsageError(path, "is not a regular file")
    too_large = UsageError(path, f"has more than {most_bytes:,} bytes, the limit")
    if stat.st_size > most_bytes:
        raise too_large
    with path.open("rb") as file:
        if stat.st_size:
            yield file
            return
        # Some files of the system have no size and no end.
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise too_large
        yield BytesIO(content)


UNTOUCHED = "existing files were not modified"
SYNCS_FOLDERS = os.name != "nt"
"""Whether the platform can open a folder, which syncing one requires."""
REPLACES_OPEN_FILES = os.name != "nt"
"""Whether the platform replaces and removes files that a process has open or mapped."""


def write_file(path: Path, data: bytes) -> None:
    """Replace the file by `data`; readers see either the old or the new bytes.

    Raises SystemFault.
    """
    with replacing(path, len(data)) as building:
        building.write_bytes(data)


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[Path]:
    """Yield a temporary path to write, and rename it to `path` if nothing fails.

    size: bytes, for the message, if known. Any OSError becomes SystemFault.
    """
    building = temporary(path)
    try:
        yield building
        _sync(building)
        building.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            building.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_fault(path, size, error) from error
        raise


def write_json(path: Path, data: Any) -> None:
    """Replace the file by `data` as JSON with sorted keys; raises SystemFault.

    Equal data gives equal bytes.
    """
    text = json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True)
    write_file(path, f"{text}\n".encode())


def check_writable(folder: Path) -> None:
    """Create the folder and check that files can be written there; raises SystemFault."""
    path = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"dstrain\n")
    except OSError as error:
        raise write_fault(folder, 0, error) from error
    finally:
        with suppress(OSError):
            path.unlink()


def refuse_link(path: Path) -> None:
    """Raise StateError for a symbolic link, which would lead a write to another place."""
    if path.is_symlink():
        what = f"contains {path.name}, which is a symbolic link and is not followed"
        raise StateError(path.parent, what, "move it away, or use another folder")


def _sync(path: Path, flags: int = os.O_RDWR) -> None:
    # Windows syncs a file only through a descriptor that may write.
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, where the platform can."""
    if SYNCS_FOLDERS:
        _sync(path, os.O_RDONLY)


def write_fault(path: Path, size: int, error: OSError) -> SystemFault:
    """Return the error for a file of `size` bytes, 0 if unknown, that cannot be written."""
    what = f"cannot write {size:,} bytes" if size else "cannot be written"
    reason = error.strerror or error
    return SystemFault(final(path), f"{what}: {reason}", UNTOUCHED)
