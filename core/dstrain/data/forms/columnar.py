"""Read parquet files, and the arrow files of `datasets`, as a table: batch by batch, and
only the columns that are used.
"""

import errno
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from dstrain.data.damage.faults import raise_system_fault
from dstrain.data.forms.cells import Convert, converter, is_embedded
from dstrain.data.forms.embedded import EmbeddedFiles
from dstrain.data.table import Fault, RawValue, Table, TableRows, refuse
from dstrain.errors import SystemFault, UsageError

PARQUET, ARROW = ".parquet", ".arrow"
ROWS_AT_ONCE = 1024
"""Rows whose cells are objects of Python at once."""
FILES_AT_ONCE = 16
"""Rows with embedded files that are in RAM at once."""
EMBED = (
    "embed images as bytes, or as records of bytes and path: text is read as the name of a "
    "file (base64.b64decode turns base64 text into bytes)"
)
Batches = Iterator[Any]
"""`pyarrow.RecordBatch` by `pyarrow.RecordBatch`."""


def columnar_columns(path: Path, files: Sequence[Path], form: str) -> Table:
    """Return the table of files without its rows.

    Raises UsageError for a file that is damaged, or has other columns than the first.

    Args:
        path: The file, or the folder of the files.
        files: The files, in the order of their rows.
        form: The kind of the dataset, in words.
    """
    return Table(path, _columns(path, files), TableRows(), (), form=form)


def read_columnar(
    path: Path, files: Sequence[Path], form: str, wanted: Mapping[str, bool]
) -> Table:
    """Read these columns of files; embedded files are written to the user's folder.

    Args:
        path: As in `columnar_columns`.
        files: As in `columnar_columns`.
        form: As in `columnar_columns`.
        wanted: Columns, and whether their cells name files, or have files in them.
    """
    columns = _columns(path, files)
    store = None
    kinds = {one.name: one.type for one in _schema(files[0])}
    if any(wanted[name] and is_embedded(kinds[name]) for name in wanted):
        store = EmbeddedFiles()
    rows = TableRows()
    rows.columns = [name for name in columns if name in wanted]
    faults: list[Fault] = []
    starts = []
    for file in files:
        starts.append(len(rows))
        reader = _Reader(file, rows.columns, wanted, store)
        for cells, reasons in reader.rows():
            faults += [
                Fault(len(rows), name, reason) for name, reason in reasons.items()
            ]
            rows.append(cells)
    lines = np.arange(1, len(rows) + 1)
    return Table(
        path,
        columns,
        rows,
        lines,
        faults,
        name_place=_Places(tuple(files), tuple(starts)),
        advice=(EMBED,) if any(wanted[fault.column] for fault in faults) else (),
        form=form,
        roots=() if store is None else (store.folder,),
    )


def columnar_texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield every text of files, with the names of embedded files but not their bytes."""
    for file in files:
        columns = _text_leaves(file) if file.suffix == PARQUET else None
        if columns == []:
            continue
        for batch in _batches(file, columns):
            for column in batch.columns:
                yield from _texts_of(column)


def _text_leaves(file: Path) -> list[str]:
    """Return the paths of the texts in a parquet file, such as 'image.path'.

    The bytes beside them are not read: they may be megabytes in each of a thousand rows.
    Of an arrow file, which is mapped, nothing is read that is not looked at.
    """
    import pyarrow.parquet as pq

    with _opened(file) as source:
        schema = pq.ParquetFile(source).schema
        leaves = [schema.column(number) for number in range(len(schema))]
    return [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "NONE"
    ]


def _texts_of(column: Any) -> Iterator[str]:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(column.type):
        for part in column.flatten():
            yield from _texts_of(part)
    elif hasattr(column, "values") and types.is_nested(column.type):
        yield from _texts_of(column.values)
    elif types.is_dictionary(column.type):
        yield from _texts_of(column.dictionary)
    elif (
        types.is_string(column.type)
        or types.is_large_string(column.type)
        or types.is_string_view(column.type)
    ):
        yield from filter(None, column.to_pylist())


@dataclass(frozen=True)
class _Places:
    """Names rows by their files, and their numbers in these from 1."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """The first row of each file."""

    def __call__(self, row: int, column: str) -> str:
        number = bisect_right(self.starts, row) - 1
        place = f"{self.files[number].name}:{row - self.starts[number] + 1}"
        return f"{place}:{column}" if column else place


class _Reader:
    """Reads rows of one file."""

    def __init__(
        self,
        file: Path,
        columns: Sequence[str],
        wanted: Mapping[str, bool],
        store: EmbeddedFiles | None,
    ) -> None:
        self.file = file
        self.columns = columns
        self.store = store
        kinds = {field.name: field.type for field in _schema(file)}
        self.convert: dict[str, Convert] = {}
        for name in columns:
            try:
                self.convert[name] = converter(
                    name, kinds[name], wanted[name], self.store
                )
            except UsageError as error:
                raise UsageError(f"{file}:{error.where}", error.what) from error
        self.embedded = [
            name for name in columns if wanted[name] and is_embedded(kinds[name])
        ]

    def rows(self) -> Iterator[tuple[list[RawValue], dict[str, str]]]:
        """Yield the cells of each row, and what is wrong with them by column."""
        others = [name for name in self.columns if name not in self.embedded]
        kept = self._kept()
        reasons: dict[str, str] = {}
        found = self._cells(others, ROWS_AT_ONCE) if others or kept is None else None
        for embedded in kept or repeat([]):
            cells = dict(zip(self.embedded, embedded, strict=False))
            if found is not None:
                row = next(found, None)
                if row is None:
                    return
                values, reasons = row
                cells |= zip(others, values, strict=True)
            yield [cells[name] for name in self.columns], reasons

    def _kept(self) -> Iterator[list[Any]] | None:
        """Return the cells of embedded files; None if there are no columns of them."""
        if not self.embedded or self.store is None:
            return None
        recalled = self.store.recall(self.file, self.embedded)
        if recalled is not None:
            return recalled
        return self.store.noting(self.file, self.embedded, self._written())

    def _written(self) -> Iterator[list[RawValue]]:
        for number, (cells, reasons) in enumerate(
            self._cells(self.embedded, FILES_AT_ONCE), 1
        ):
            for name, reason in reasons.items():
                raise UsageError(f"{self.file.name}:{number}:{name}", reason)
            yield cells

    def _cells(
        self, columns: Sequence[str], at_once: int
    ) -> Iterator[tuple[list[RawValue], dict[str, str]]]:
        """Yield the cells of some columns in each row."""
        for batch in _batches(self.file, columns, at_once):
            values = [_values(self.file, batch, name) for name in columns]
            for number in range(batch.num_rows):
                cells: list[RawValue] = []
                reasons = {}
                for name, column in zip(columns, values, strict=True):
                    try:
                        cells.append(self.convert[name](column[number]))
                    except ValueError as error:
                        cells.append("")
                        reasons[name] = str(error)
                yield cells, reasons


def _values(file: Path, batch: Any, name: str) -> list[Any]:
    try:
        return list(batch.column(name).to_pylist())
    except (UnicodeDecodeError, OverflowError) as error:
        what = f"column {name} has a value that cannot be read: {error}"
        raise UsageError(file, what) from error


def _columns(path: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Return the columns of files, which must have the same ones."""
    first: tuple[str, ...] = ()
    for file in files:
        names = tuple(_schema(file).names)
        if not first:
            first = names
            twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
            refuse(file, "column name", [f"{name!r} appears twice" for name in twice])
        lacking = [name for name in first if name not in names]
        if lacking or len(names) > len(first):
            others = ", ".join(lacking or [one for one in names if one not in first])
            what = f"has other columns than {files[0].name}: {others}"
            raise UsageError(file, what)
    return first


def _schema(file: Path) -> Any:
    """Return the `pyarrow.Schema` of a file."""
    import pyarrow.parquet as pq

    with _opened(file) as source:
        if file.suffix == PARQUET:
            return pq.ParquetFile(source).schema_arrow
        return _stream(source).schema


def _batches(
    file: Path, columns: Collection[str] | None, at_once: int = ROWS_AT_ONCE
) -> Batches:
    """Yield the rows of some columns of a file, or of all."""
    import pyarrow.parquet as pq

    with _opened(file) as source:
        if file.suffix == PARQUET:
            names = None if columns is None else list(columns)
            # Without what is to come in RAM: a group of rows may have many images.
            whole = pq.ParquetFile(source, pre_buffer=False)
            yield from whole.iter_batches(at_once, columns=names, use_threads=False)
            return
        for batch in _stream(source):
            part = batch if columns is None else batch.select(list(columns))
            for start in range(0, part.num_rows, at_once):
                yield part.slice(start, at_once)


def _stream(source: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(source)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file for Arrow; raises UsageError if it is damaged, or no file of its kind."""
    import pyarrow as pa

    try:
        if not S_ISREG(file.stat().st_mode):
            raise UsageError(file, "is not a regular file")
        with pa.memory_map(os.fsencode(file)) as source:
            yield source
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise _damaged(file, error) from error
    except MemoryError as error:
        raise_system_fault(file, error)
        raise
    except OSError as error:
        if error.errno is None:
            # Not of the system: Arrow says so of what is in a file.
            raise _damaged(file, error) from error
        raise_system_fault(file, error)
        if error.errno == errno.ENOENT:
            raise UsageError(file, "no such file") from error
        raise SystemFault(file, f"cannot be read: {error}") from error


def _damaged(file: Path, error: Exception) -> UsageError:
    reason = str(error).partition("\n")[0]
    return UsageError(file, f"cannot be read as {file.suffix[1:]}: {reason}")
