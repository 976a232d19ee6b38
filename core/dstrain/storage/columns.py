"""Write and read tables of columns as Arrow files, of which only a part is ever in RAM.

A file is written batch by batch and named by the hash of its bytes. It is read as mapped
memory: what of it is used is in the system's cache of files, and leaves it when RAM is
needed. An Arrow file has no checksum of its own; the name is one.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import xxhash

from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import REPLACES_OPEN_FILES, replacing

Numbers = Sequence[int] | np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True)
class Chosen(Sequence[Any]):
    """Some of the values of a sequence, made when they are used."""

    values: Sequence[Any]
    numbers: Numbers

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "Chosen": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one of them, or those of a slice."""
        if isinstance(index, slice):
            return Chosen(self.values, self.numbers[index])
        return self.values[self.numbers[index]]


class Joined(Sequence[Any]):
    """Several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        """Join sequences that do not change any more."""
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        """Return how many values there are."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Chosen: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one of them, or those of a slice."""
        if isinstance(index, slice):
            return Chosen(self, range(len(self))[index])
        number = range(len(self))[index]
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order."""
        return chain.from_iterable(self._parts)


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
