"""Lay out and check the file in which values computed from files are remembered."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dstrain.errors import SystemFault
from dstrain.storage.files import REPLACES_OPEN_FILES

MARK = struct.Struct("<QqqQ")
VALUE_BYTES = 32
ENTRY = np.dtype(
    [
        ("key", "<u8"),
        ("rest", "<u8"),
        ("mark", f"V{MARK.size}"),
        ("value", f"V{VALUE_BYTES}"),
        ("settled", "?"),
    ]
)
Entries = np.ndarray[Any, np.dtype[np.void]]
FORM = b"dstrain remembers files, form 1".ljust(MARK.size)
"""In place of the mark of the first entry, whose value is the hash of the others."""
HEADER_BYTES = 4096
"""Bytes at the beginning of a file, among which the form is."""


def unreadable(path: str | Path, error: OSError) -> SystemFault:
    """Return the error for a file that cannot be read."""
    return SystemFault(path, f"cannot be read: {error.strerror}")


def is_whole(path: Path) -> bool:
    """Return whether a file is as `ManyFiles.save` wrote it; raises SystemFault."""
    return is_own(path) and stored_entries(path) is not None


def is_own(path: Path) -> bool:
    """Return whether `ManyFiles.save` wrote a file, which may have been damaged since;
    raises SystemFault if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return FORM in file.read(HEADER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def checksum(entries: Entries) -> bytes:
    """Return the hash of entries, which the first of the file has as its value."""
    digest = xxhash.xxh3_128_digest(np.ascontiguousarray(entries).view(np.uint8).data)
    return digest.ljust(VALUE_BYTES, b"\0")


def stored_entries(path: Path) -> Entries | None:
    """Return the entries of a file; None if it is unreadable, or of another form."""
    try:
        table: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    if table.dtype != ENTRY or table.ndim != 1 or not len(table):
        return None
    head, entries = table[0], table[1:]
    known = head["mark"].tobytes() == FORM
    if not known or head["value"].tobytes() != checksum(entries):
        return None
    # Where it is mapped, `save` could not replace it.
    return np.asarray(entries) if REPLACES_OPEN_FILES else np.array(entries)
