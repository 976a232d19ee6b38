"""Write and read tables of columns as Arrow files, of which only a part is ever in RAM.

A file is written batch by batch and named by the hash of its bytes. It is read as mapped
memory: what of it is used is in the system's cache of files, and leaves it when RAM is
needed. An Arrow file has no checksum of its own; the name is one.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import REPLACES_OPEN_FILES, replacing

SUFFIX = ".arrow"
BATCH_ROWS = 16_384
"""Rows that are objects of Python at once, while a table is written or walked over."""
CHUNK = 2**20
"""Bytes that are hashed at once."""
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What the system says where there is no file of a name; whatever else it says of one that
is opened or read is a fault of the machine, and tells nothing of what is in the file."""


def write_columns(folder: Path, schema: Any, batches: Iterable[Any]) -> str:
    """Commit a table as a file of the folder; return its name without the suffix.

    Equal tables in equal batches have equal names. Raises SystemFault.

    Args:
        folder: Where the file will be.
        schema: The names and types of columns, a `pyarrow.Schema`.
        batches: Its rows, `pyarrow.RecordBatch` by `pyarrow.RecordBatch`.
    """
    import pyarrow as pa

    # Its final name is known when it is complete; `replacing` renames to that of a
    # path that is then not there.
    draft = folder / f"draft{SUFFIX}"
    with replacing(draft) as building:
        with building.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        name = file_hash(building)
    draft.replace(folder / f"{name}{SUFFIX}")
    return name


def open_columns(path: Path, advice: str = "") -> Any:
    """Return a table that `write_columns` wrote, a `pyarrow.Table` over mapped memory
    where the file can be removed all the same, else in RAM.

    Raises StateError with the advice if it is missing, or its name is not the hash of
    its bytes; SystemFault if it cannot be read.
    """
    import pyarrow as pa

    help_lines = [advice] if advice else []
    try:
        if file_hash(path) != path.stem:
            what = "is damaged: its name is not the hash of its bytes"
            raise StateError(path, what, *help_lines)
        if not REPLACES_OPEN_FILES:
            return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
        with pa.memory_map(os.fsencode(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except (*NO_FILE, pa.ArrowInvalid) as error:
        raise StateError(path, f"cannot be read: {error}", *help_lines) from error
    except OSError as error:
        if error.errno is None:
            # Not of the system: Arrow says so of what is in a file.
            raise StateError(path, f"cannot be read: {error}", *help_lines) from error
        reason = os.strerror(error.errno)
        raise SystemFault(path, f"cannot be read: {reason}") from error


def file_hash(path: Path) -> str:
    """Return the hash of a file's bytes, in hexadecimal; raises OSError.

    It notices damage ten times as fast as sha256, and does not withstand forgery.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
