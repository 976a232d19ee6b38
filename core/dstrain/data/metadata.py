"""Metadata of a data set: csv, json or jsonl, read strictly and kept as written."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.errors import SystemFault, UsageError

SUFFIXES = (".csv", ".json", ".jsonl")
MAX_FAULTS_SHOWN = 50
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""How a file in UTF-16 begins, and one in UTF-32 that is read by Intel's order of
bytes.
"""
MAX_CELL_LENGTH = 2**20
"""Characters in a cell: above any caption or list of files; more is a quote that was
never closed.
"""
DELIMITERS = MappingProxyType({";": "semicolons", "\t": "tabs", "|": "bars"})
"""What stands between cells in files that are called csv and are not."""
RawValue = str | list[str]
"""A cell as written: text, or from json a list of texts. '' is an absent cell."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row (counted from 0), or with one cell of it."""

    row: int
    column: str
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows of metadata, each with every column.

    lines: per row, its first line (csv, jsonl) or its number (json). faults: of rows
    that are not as a row should be; such a row keeps its place, and what could not be
    read of it is ''.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, RawValue], ...]
    lines: tuple[int, ...]
    faults: tuple[Fault, ...] = ()

    def where(self, row: int, column: str = "") -> str:
        """Name a row, or a cell of it, for a message: 'metadata.csv:3:prompt'. Row 0 is
        the first.
        """
        place = f"{self.path.name}:{self.lines[row]}"
        return f"{place}:{column}" if column else place

    def refuse(self, faults: Iterable[Fault]) -> None:
        """Raise one UsageError that names the place of each fault, in the order of
        rows; do nothing without any.
        """
        ordered = sorted(dict.fromkeys(faults), key=lambda fault: fault.row)
        kind = "cell" if all(fault.column for fault in ordered) else "row"
        refuse(
            str(self.path),
            kind,
            [
                f"{self.where(fault.row, fault.column)}: {fault.reason}"
                for fault in ordered
            ],
        )


def read_metadata(path: Path) -> Table:
    """Read a table; the suffix says which kind of file it is. Blank lines are ignored,
    a header may stand alone.

    Numbers and booleans of json become the text that was written, null and a name left
    out become ''. Rows that are wrong are told in `Table.faults`. Raises UsageError for
    a file that is no table, and SystemFault if reading fails.
    """
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            str(path), f"metadata is a file that ends in {', '.join(SUFFIXES)}"
        )
    return reader(path, _read_text(path))


def refuse(where: str, what: str, faults: Sequence[str]) -> None:
    """Raise one UsageError that lists the first 50 faults and counts the others; do
    nothing if there are none.
    """
    if faults:
        more = (
            [f"and {len(faults) - MAX_FAULTS_SHOWN} more"]
            if len(faults) > MAX_FAULTS_SHOWN
            else []
        )
        raise UsageError(
            where,
            f"{len(faults)} bad {what}{'s' if len(faults) > 1 else ''}",
            *faults[:MAX_FAULTS_SHOWN],
            *more,
        )


def text_fault(text: str) -> str:
    """Say what keeps a cell's text from being text that can be read and written; '' if
    nothing does.
    """
    if len(text) > MAX_CELL_LENGTH:
        return f"has {len(text):,} characters; a cell has at most {MAX_CELL_LENGTH:,}"
    if "\0" in text:
        return "has a NUL character, which is no text"
    if re.search("[\ud800-\udfff]", text):
        return (
            "has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        )
    return ""


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(str(path), "no such metadata file") from error
    except OSError as error:
        raise SystemFault(str(path), f"cannot be read: {error.strerror}") from error
    data = data.removeprefix(BYTE_ORDER_MARK)
    start = data[:1000]
    if (
        data.startswith(OTHER_MARKS) or start.count(0) > len(start) // 4
    ):  # Latin text: every other byte is 0
        raise UsageError(
            str(path), "is UTF-16 or UTF-32 text, not UTF-8", "save it as UTF-8"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}",
            f"is not UTF-8 text (byte 0x{data[error.start]:02x})",
            "save it as UTF-8",
        ) from error


def _read_csv(path: Path, text: str) -> Table:
    records = _records(path, text)
    if not records:
        raise UsageError(str(path), "is empty; the first line names the columns")
    (first, columns), *body = records
    if len(columns) == 1:
        for sign, name in DELIMITERS.items():
            if sign in columns[0]:
                advice = f"save it with commas, and quotes around texts that hold {name} or commas"
                raise UsageError(
                    f"{path}:{first}",
                    f"has {name} between its cells, where csv has commas",
                    advice,
                )
    refuse(str(path), "column name", _column_faults(columns))
    faults: list[Fault] = []
    rows: list[Mapping[str, RawValue]] = []
    for row, (_, cells) in enumerate(body):
        found = [
            (name, text_fault(cell)) for name, cell in zip(columns, cells, strict=False)
        ]
        faults += [Fault(row, name, reason) for name, reason in found if reason]
        if len(cells) != len(columns):
            advice = (
                "; quotes around a text keep its commas"
                if len(cells) > len(columns)
                else ""
            )
            said = f"has {len(cells)} cells, but the first line names {len(columns)} columns{advice}"
            faults.append(Fault(row, "", said))
        rows.append(dict(zip(columns, [*cells, *[""] * len(columns)], strict=False)))
    return Table(
        path,
        tuple(columns),
        tuple(rows),
        tuple(line for line, _ in body),
        tuple(faults),
    )


def _records(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """The records of a csv file that are not blank, each with the line it begins at."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []
    line = 1
    with _cells_of_any_length():
        try:
            for cells in reader:
                if len(cells) > 1 or "".join(cells).strip():
                    records.append((line, cells))
                line = reader.line_num + 1
        except csv.Error as error:
            never = (
                ("a quote that opens a cell here is never closed",)
                if "end of data" in str(error)
                else ()
            )
            raise UsageError(
                f"{path}:{line}", f"is not csv: {error}", *never
            ) from error
    return records


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """Let long cells be read, so that they are told with their row and column; the csv
    module has one limit for all.
    """
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _column_faults(columns: Iterable[str]) -> list[str]:
    faults: list[str] = []
    seen: set[str] = set()
    for number, name in enumerate(columns, 1):
        if reason := text_fault(name):
            faults.append(f"column {number} {reason}")
        elif not name.strip():
            faults.append(f"column {number} has no name; name it or leave it out")
        elif name != name.strip():
            faults.append(f"column {number}, {name!r}, has blanks around its name")
        elif name in seen:
            faults.append(f"column {number}, {name!r}, has the name of an earlier one")
        seen.add(name)
    return faults


class _Object(tuple[tuple[str, Any], ...]):
    """A json object as its pairs, so that a name written twice is seen."""


def _parse(text: str, where: str) -> Any:
    """Parse json with numbers as written; only the constants that are no json (NaN,
    Infinity) become floats.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_Object,
            parse_int=str,
            parse_float=str,
            parse_constant=float,
        )
    except json.JSONDecodeError as error:
        raise UsageError(where, f"is not json: {error}") from error
    except RecursionError as error:
        raise UsageError(where, "is not a table: nested too deep") from error


def _read_json(path: Path, text: str) -> Table:
    try:
        records = _parse(text, str(path))
    except UsageError as error:
        if _is_object(next(filter(str.strip, text.split("\n")), "")):
            advice = f"name it {path.with_suffix('.jsonl').name}"
            raise UsageError(
                str(path), "has an object in each line, as jsonl does", advice
            ) from error
        raise
    if not isinstance(records, list):
        raise UsageError(
            str(path),
            "is not a list of objects, one per row",
            'written as [{"image": "a.png", "prompt": "a dog"}, ...]',
        )
    return _table(path, list(enumerate(records, 1)), {})


def _is_object(text: str) -> bool:
    try:
        return isinstance(_parse(text, ""), _Object)
    except UsageError:
        return False


def _read_jsonl(path: Path, text: str) -> Table:
    records: list[tuple[int, Any]] = []
    faults: dict[int, str] = {}
    # Not splitlines(): it also splits at U+2028 and the like, which json allows inside
    # a text.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((number, _parse(line, "")))
            except UsageError as error:
                faults[len(records)] = error.what
                records.append((number, None))
    if text.lstrip().startswith("["):
        advice = f"name it {path.with_suffix('.json').name}, or write one object in each line"
        raise UsageError(
            str(path),
            "is a list, as json has it, where jsonl has an object in each line",
            advice,
        )
    return _table(path, records, faults)


def _table(
    path: Path, records: list[tuple[int, Any]], unread: Mapping[int, str]
) -> Table:
    """A table of json records; unread: the rows that are no json, and why."""
    faults: list[Fault] = []
    rows: list[dict[str, RawValue]] = []
    for index, (_, record) in enumerate(records):
        row: dict[str, RawValue] = {}
        rows.append(row)
        if not isinstance(record, _Object):
            faults.append(Fault(index, "", unread.get(index, "is not an object")))
            continue
        for name, value in record:
            if name in row:
                faults.append(Fault(index, name, "stands twice in one row"))
            row[name], reason = _as_written(value)
            if reason:
                faults.append(Fault(index, name, reason))
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    refuse(str(path), "column name", _column_faults(columns))
    full = tuple({name: row.get(name, "") for name in columns} for row in rows)
    return Table(
        path, columns, full, tuple(number for number, _ in records), tuple(faults)
    )


def _as_written(value: Any) -> tuple[RawValue, str]:
    """A value of json as a cell, and what is wrong with it."""
    if isinstance(value, str):
        return value, text_fault(value)
    if value is None:
        return "", ""
    if isinstance(value, bool):
        return ("true" if value else "false"), ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value, next(filter(None, map(text_fault, value)), "")
    if isinstance(value, float):
        return "", f"{value} is not json; an absent cell is null"
    return "", "a cell is a text, a number, true, false, null or a list of texts"
