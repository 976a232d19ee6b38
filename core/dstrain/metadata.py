"""Metadata of a data set: csv, json or jsonl, read strictly and kept as written."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import SystemFault, UsageError

SUFFIXES = (".csv", ".json", ".jsonl")
FAULTS_SHOWN = 50
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Written = str | list[str]
"""A cell as written: text, or from json a list of texts. '' is an absent cell."""


@dataclass(frozen=True)
class Table:
    """Rows of metadata, each with every column. `lines`: per row, its first line (csv, jsonl) or its number (json)."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Written], ...]
    lines: tuple[int, ...]

    def where(self, row: int, column: str = "") -> str:
        """Name a row, or a cell of it, for a message: 'metadata.csv:3:prompt'. Row 0 is the first."""
        place = f"{self.path.name}:{self.lines[row]}"
        return f"{place}:{column}" if column else place


def read_metadata(path: Path) -> Table:
    """Read a table; the suffix says which kind of file it is. Blank lines are ignored, a header may stand alone.

    Numbers and booleans of json become the text that was written, null and a name left out become ''.
    Raises UsageError for a file that is not one clean table, with all its bad rows, and SystemFault if reading fails.
    """
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(str(path), f"metadata is a file that ends in {', '.join(SUFFIXES)}")
    return reader(path, _read_text(path))


def refuse(where: str, what: str, faults: Sequence[str]) -> None:
    """Raise one UsageError that lists the first 50 faults and counts the others; do nothing if there are none."""
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        raise UsageError(
            where, f"{len(faults)} bad {what}{'s' if len(faults) > 1 else ''}", *faults[:FAULTS_SHOWN], *more
        )


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(str(path), "no such metadata file") from error
    except OSError as error:
        raise SystemFault(str(path), f"cannot be read: {error.strerror}") from error
    data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}:{line}", f"is not UTF-8 text (byte 0x{data[error.start]:02x})", "save it as UTF-8"
        ) from error


def _read_csv(path: Path, text: str) -> Table:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip():
                records.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}:{line}", f"is not csv: {error}") from error
    if not records:
        raise UsageError(str(path), "is empty; the first line names the columns")
    (_, columns), *body = records
    refuse(str(path), "column name", _column_faults(columns))
    ragged = [(line, len(cells)) for line, cells in body if len(cells) != len(columns)]
    said = f"but the first line names {len(columns)} columns"
    refuse(str(path), "row", [f"{path.name}:{line}: has {width} cells, {said}" for line, width in ragged])
    rows = tuple(dict(zip(columns, cells, strict=True)) for _, cells in body)
    return Table(path, tuple(columns), rows, tuple(line for line, _ in body))


def _column_faults(columns: Iterable[str]) -> list[str]:
    faults: list[str] = []
    seen: set[str] = set()
    for number, name in enumerate(columns, 1):
        if not name.strip():
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
    """Parse json with numbers as written; only the constants that are no json (NaN, Infinity) become floats."""
    try:
        return json.loads(text, object_pairs_hook=_Object, parse_int=str, parse_float=str, parse_constant=float)
    except json.JSONDecodeError as error:
        raise UsageError(where, f"is not json: {error}") from error
    except RecursionError as error:
        raise UsageError(where, "is not a table: nested too deep") from error


def _read_json(path: Path, text: str) -> Table:
    records = _parse(text, str(path))
    if not isinstance(records, list):
        raise UsageError(str(path), "is not a list of objects, one per row")
    return _table(path, list(enumerate(records, 1)), [])


def _read_jsonl(path: Path, text: str) -> Table:
    records: list[tuple[int, Any]] = []
    faults: list[str] = []
    # Not splitlines(): it also splits at U+2028 and the like, which json allows inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((number, _parse(line, f"{path.name}:{number}")))
            except UsageError as error:
                faults.append(f"{error.where}: {error.what}")
    return _table(path, records, faults)


def _table(path: Path, records: list[tuple[int, Any]], faults: list[str]) -> Table:
    rows: list[dict[str, Written]] = []
    for number, record in records:
        if not isinstance(record, _Object):
            faults.append(f"{path.name}:{number}: is not an object")
            continue
        row: dict[str, Written] = {}
        for name, value in record:
            where = f"{path.name}:{number}:{name}"
            if name in row:
                faults.append(f"{where}: stands twice in one row")
            row[name] = _as_written(value, where, faults)
        rows.append(row)
    refuse(str(path), "cell", faults)
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    refuse(str(path), "column name", _column_faults(columns))
    full = tuple({name: row.get(name, "") for name in columns} for row in rows)
    return Table(path, columns, full, tuple(number for number, _ in records))


def _as_written(value: Any, where: str, faults: list[str]) -> Written:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(value, float):
        faults.append(f"{where}: {value} is not json; an absent cell is null")
    else:
        faults.append(f"{where}: a cell is a text, a number, true, false, null or a list of texts")
    return ""
