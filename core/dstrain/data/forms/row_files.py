"""Read the rows of files by the form of a plugin: what it raises gets its place, and the
contents that it yields are kept as files.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

import numpy as np

from dstrain.data.faults import raise_system_fault
from dstrain.data.forms.contents import Contents
from dstrain.data.forms.form import Content, Form, FormCell, Source
from dstrain.data.table import (
    Fault,
    RawValue,
    Table,
    TableRows,
    name_fault,
    text_fault,
)
from dstrain.errors import DstrainError, SystemFault, UsageError

T = TypeVar("T")


def file_columns(source: Source) -> Table:
    """Return the table of files without its rows.

    Raises UsageError for a file that is damaged, or has other columns than the first.
    """
    return Table(source.path, _columns(source), TableRows(), (), form=source.in_words)


def read_files(source: Source, wanted: Mapping[str, bool]) -> Table:
    """Read these columns of files; contents are written to the user's folder.

    Args:
        source: Where the files are.
        wanted: Columns, and whether their cells name files, or are files.
    """
    form = _form_of(source)
    columns = _columns(source)
    used = {name: wanted[name] for name in columns if name in wanted}
    rows = TableRows()
    rows.columns = list(used)
    faults: list[Fault] = []
    starts: list[int] = []
    kept = _Kept()
    for file in source.files:
        starts.append(len(rows))
        for cells, reasons in _Reader(form, file, used, kept).rows():
            faults += [
                Fault(len(rows), name, reason) for name, reason in reasons.items()
            ]
            rows.append(cells)
    lines = np.arange(1, len(rows) + 1)
    return Table(
        source.path,
        columns,
        rows,
        lines,
        faults,
        name_place=_Places(source.files, tuple(starts)),
        advice=form.advice if any(wanted[fault.column] for fault in faults) else (),
        form=source.in_words,
        roots=kept.folders,
    )


def texts_in(source: Source) -> Iterator[str]:
    """Yield every text in the files of a source."""
    form = _form_of(source)
    for file in source.files:
        yield from _guarded(form, file, form.texts)


def _form_of(source: Source) -> Form:
    assert source.reader is not None  # it was found by one
    return source.reader


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


class _Kept:
    """The contents of rows, whose folder is made with the first of them."""

    def __init__(self) -> None:
        self._contents: Contents | None = None

    @property
    def contents(self) -> Contents:
        if self._contents is None:
            self._contents = Contents()
        return self._contents

    @property
    def folders(self) -> tuple[Path, ...]:
        return () if self._contents is None else (self._contents.folder,)


class _Reader:
    """Reads rows of one file."""

    def __init__(
        self, form: Form, file: Path, columns: Mapping[str, bool], kept: _Kept
    ) -> None:
        self.form = form
        self.file = file
        self.columns = columns
        self.kept = kept
        may_hold = _columns_of(form, file)
        self.held = [name for name in columns if columns[name] and may_hold[name]]

    def rows(self) -> Iterator[tuple[list[RawValue], dict[str, str]]]:
        """Yield the cells of each row, and what is wrong with them by column."""
        others = [name for name in self.columns if name not in self.held]
        recalled = self._recalled()
        reasons: dict[str, str] = {}
        found = self._cells(others) if others or recalled is None else None
        for held in recalled or repeat([]):
            cells = dict(zip(self.held, held, strict=False))
            if found is not None:
                row = next(found, None)
                if row is None:
                    return
                values, reasons = row
                cells |= zip(others, values, strict=True)
            yield [cells[name] for name in self.columns], reasons

    def _recalled(self) -> Iterator[list[Any]] | None:
        """Return the cells that may be contents; None if there are no columns of them."""
        if not self.held:
            return None
        contents = self.kept.contents
        known = contents.recall(self.form, self.file, self.held)
        if known is not None:
            return known
        return contents.noting(self.form, self.file, self.held, self._written())

    def _written(self) -> Iterator[list[RawValue]]:
        for number, (cells, reasons) in enumerate(self._cells(self.held), 1):
            for name, reason in reasons.items():
                raise UsageError(f"{self.file.name}:{number}:{name}", reason)
            yield cells

    def _cells(
        self, columns: Sequence[str]
    ) -> Iterator[tuple[list[RawValue], dict[str, str]]]:
        """Yield the cells of some columns in each row."""
        used = {name: self.columns[name] for name in columns}
        for row in _guarded(self.form, self.file, self.form.rows, used):
            cells: list[RawValue] = []
            reasons = {}
            for name, is_file in used.items():
                try:
                    cell = row.get(name, "")
                    # Most are text, of which a table may have millions.
                    if isinstance(cell, str):
                        cells.append(self._one(cell, is_file))
                    else:
                        cells.append(self._cell(cell, is_file))
                except ValueError as error:
                    cells.append("")
                    reasons[name] = str(error)
            yield cells, reasons

    def _cell(self, cell: FormCell, is_file: bool) -> RawValue:
        """Return a cell as it would be written in a table; raise ValueError."""
        if isinstance(cell, list):
            return [self._one(item, is_file) for item in cell] or ""
        return self._one(cell, is_file)

    def _one(self, cell: str | Content | ValueError, is_file: bool) -> str:
        if isinstance(cell, str):
            if fault := (name_fault(cell) if is_file else "") or text_fault(cell):
                raise ValueError(fault)
            return cell
        if isinstance(cell, Content):
            return self.kept.contents.keep(cell)
        if isinstance(cell, ValueError):
            raise cell
        what = f"form {self.form.name} gave a cell that is a {type(cell).__name__}"
        raise UsageError(self.file, what)


def _columns(source: Source) -> tuple[str, ...]:
    """Return the columns of files, which must have the same ones."""
    form = _form_of(source)
    first: tuple[str, ...] = ()
    for file in source.files:
        names = tuple(_columns_of(form, file))
        first = first or names
        lacking = [name for name in first if name not in names]
        if lacking or len(names) > len(first):
            others = ", ".join(lacking or [one for one in names if one not in first])
            what = f"has other columns than {source.files[0].name}: {others}"
            raise UsageError(file, what)
    return first


def _columns_of(form: Form, file: Path) -> Mapping[str, bool]:
    with _named(form, file):
        return form.columns(file)


def _guarded(
    form: Form, file: Path, read: Callable[..., Iterator[T]], *given: Any
) -> Iterator[T]:
    with _named(form, file):
        yield from read(file, *given)


@contextmanager
def _named(form: Form, file: Path) -> Iterator[None]:
    """Name the file in what its form raises, and tell faults of the machine."""
    try:
        if not S_ISREG(file.stat().st_mode):
            raise UsageError(file, "is not a regular file")
        yield
    except DstrainError:
        raise
    except Exception as error:
        raise_system_fault(file, error)
        if isinstance(error, FileNotFoundError):
            raise UsageError(file, "no such file") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise SystemFault(file, f"cannot be read: {error}") from error
        # Of a damaged file: libraries say so by errors of any kind.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(file, f"cannot be read as {form.name}: {reason}") from error
