"""Values that are too many for RAM, one after the other in a temporary file."""

import json
import os
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

from dstrain.errors import SystemFault
from dstrain.storage.columns import BATCH_ROWS
from dstrain.storage.lazy_sequences import Lazy

MOST_IN_RAM = 2**20
"""Bytes that wait in RAM until they are written; what is smaller makes no file."""
_position = threading.Lock()
"""Held by who moves the position of a file, where the platform cannot read elsewhere."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class Spool(Lazy[Any]):
    """JSON values, appended once and then read by number or in order.

    Each takes the bytes of its JSON text in a file without a name, which is gone with
    the processes that use it, and eight bytes of RAM.
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._ends = array("q", [0])
        self._in_ram = bytearray()
        self._file: int | None = None

    def append(self, value: Any) -> None:
        """Add a value; raises SystemFault where the temporary folder is full."""
        # Names of files that are not UTF-8 have halves of surrogate pairs.
        data = _encode(value).encode("utf-8", "surrogatepass")
        self._in_ram += data
        self._ends.append(self._ends[-1] + len(data))
        if len(self._in_ram) > MOST_IN_RAM:
            self._write()

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._ends) - 1

    def one(self, number: int) -> Any:
        """Return a value by its number, from 0 on."""
        start, end = self._ends[number], self._ends[number + 1]
        return _value(self._read(start, end))

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order; the file is read in slices."""
        for first in range(0, len(self), BATCH_ROWS):
            last = min(first + BATCH_ROWS, len(self))
            start = self._ends[first]
            data = self._read(start, self._ends[last])
            for number in range(first, last):
                end = self._ends[number + 1]
                yield _value(data[self._ends[number] - start : end - start])

    def _read(self, start: int, end: int) -> bytes:
        if self._file is None:
            return bytes(self._in_ram[start:end])
        if self._in_ram:
            self._write()
        # Not from mapped memory: a walk over all rows would take their size in RAM.
        return _read_at(self._file, start, end)

    def _write(self) -> None:
        try:
            if self._file is None:
                with tempfile.TemporaryFile() as file:
                    self._file = self._kept(os.dup(file.fileno()))
            view = memoryview(self._in_ram)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            folder = tempfile.gettempdir()
            what = f"cannot take the rows of the dataset: {error.strerror}"
            advice = "set TMPDIR to a folder with room"
            raise SystemFault(folder, what, advice) from error
        self._in_ram = bytearray()

    def _kept(self, file: int) -> int:
        weakref.finalize(self, os.close, file)
        return file

    def __getstate__(self) -> dict[str, Any]:
        """Hand the open file to a process that is started, where that can be."""
        if self._file is not None and self._in_ram:
            self._write()
        if self._file is None:
            return vars(self)
        if not hasattr(reduction, "DupFd"):
            # Windows shares no open file: the other process writes one of its own.
            content = bytearray(self._read(0, self._ends[-1]))
            return {**vars(self), "_in_ram": content, "_file": None}
        return {**vars(self), "_file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file that was handed over."""
        vars(self).update(state)
        if state["_file"] is not None:
            self._file = self._kept(state["_file"].detach())
        elif len(self._in_ram) > MOST_IN_RAM:
            self._write()


def _read_at(file: int, start: int, end: int) -> bytes:
    """Return these bytes of a file, whose position stays at its end."""
    if hasattr(os, "pread"):
        found: bytes = os.pread(file, end - start, start)
        return found
    with _position:
        os.lseek(file, start, os.SEEK_SET)
        data = os.read(file, end - start)
        os.lseek(file, 0, os.SEEK_END)
    return data


def _value(data: bytes) -> Any:
    return _decode(data.decode("utf-8", "surrogatepass"))[0]
