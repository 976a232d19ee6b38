"""Metadata tables: csv, json or jsonl, read strictly."""

import codecs
import csv
import io
import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from dstrain.console import number_of
from dstrain.data.table import Fault, RawValue, Table, TableRows, refuse, text_fault
from dstrain.errors import SystemFault, UsageError
from dstrain.storage.files import open_limited

SUFFIXES = (".csv", ".json", ".jsonl")
MAX_BYTES = 2**30
"""Bytes of the largest table: millions of rows, and still a part of a machine's RAM."""
BYTES = "surrogateescape"
"""How bytes are decoded that are not UTF-8: `text_fault` refuses what becomes of them, in the
row where it is."""
BOM = codecs.BOM_UTF8
JSON_ADVICE = (
    'a .json file contains a list, [{"image": "a.png", "prompt": "a dog"}, ...]; for one object '
    "per line, use .jsonl"
)


def metadata_files(base_path: Path) -> list[Path]:
    """Return the metadata files in a folder."""
    paths = [base_path / f"metadata{suffix}" for suffix in SUFFIXES]
    return list(filter(Path.is_file, paths))


def read_metadata(path: Path) -> Table:
    """Read a table in the format that its suffix names.

    Blank lines are ignored, and a header may stand alone. Numbers and booleans of json
    become the text that was written; null and names left out become ''. Raises
    UsageError for a file that is not a table, and SystemFault.
    """
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(path, "metadata must be a .csv, .json or .jsonl file")
    with _opened(path) as file:
        table = reader(path, file)
    # Of the whole table: skipped as rows, all that has an accent would be lost.
    table.refuse(one for one in table.faults if "not UTF-8" in one.reason)
    return table


def read_columns(path: Path) -> Table:
    """Read what `read_metadata` reads without its rows, as far as the format lets these
    be left out: of a .csv only the first line is parsed.
    """
    if path.suffix.lower() != ".csv":
        return read_metadata(path)
    with _opened(path) as file:
        return _read_csv(path, file, rows=False)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a table after the byte order mark that some programs put first."""
    try:
        with open_limited(path, MAX_BYTES) as file:
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            yield file
    except FileNotFoundError as error:
        what = "no such metadata file; give its path from the folder where you run this"
        raise UsageError(path, what) from error
    except OSError as error:
        raise SystemFault(path, f"cannot be read: {error.strerror}") from error


def _read_csv(path: Path, file: IO[bytes], rows: bool = True) -> Table:
    # Line ends stay, since quoted cells may contain them.
    text = io.TextIOWrapper(file, "utf-8", BYTES, newline="")
    # A long cell is reported with its row and column; the module has one limit for all.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        records = _csv_records(path, text)
        return _csv_table(path, records if rows else islice(records, 1))
    finally:
        csv.field_size_limit(limit)
        text.detach()


def _csv_table(path: Path, records: Iterator[tuple[int, list[str]]]) -> Table:
    first = next(records, None)
    if first is None:
        raise UsageError(path, "is empty; the first line must name the columns")
    line, columns = first
    refuse(path, "column name", _column_faults(columns))
    faults: list[Fault] = []
    rows = TableRows()
    rows.columns = columns
    lines = array("q")
    for row, (line, cells) in enumerate(records):
        named = cells[: len(columns)]
        rows.append(named)
        lines.append(line)
        # Most rows have no fault: one look at all of the cells shows it.
        if text_fault("".join(named)):
            for name, cell in zip(columns, named, strict=False):
                if reason := text_fault(cell):
                    faults.append(Fault(row, name, reason))
        if len(cells) != len(columns):
            reason = f"has {number_of(len(cells), 'value')}, but the first line names {len(columns)} columns"
            if len(cells) > len(columns):
                reason += "; put quotes around a text that contains commas"
            faults.append(Fault(row, "", reason))
    return Table(path, tuple(columns), rows, np.array(lines, np.int64), faults)


def _csv_records(path: Path, text: IO[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank, each with the line on which it begins."""
    reader = csv.reader(text, strict=True)
    line = 1
    try:
        for cells in reader:
            if len(cells) > 1 or "".join(cells).strip():
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        advice = "close the quotes around a value, and double those inside it"
        what = f"is not valid CSV: {error}"
        raise UsageError(f"{path}:{line}", what, advice) from error


def _column_faults(columns: Iterable[str]) -> list[str]:
    faults: list[str] = []
    seen: set[str] = set()
    for number, name in enumerate(columns, 1):
        reason = text_fault(name)
        if not name.strip():
            reason = "has no name; name it or remove it (pandas: index=False)"
        elif name != name.strip():
            reason = f"has spaces around its name, {name!r}"
        elif name in seen:
            reason = f"has the same name as an earlier one, {name!r}"
        if reason:
            faults.append(f"column {number} {reason}")
        seen.add(name)
    return faults


def _parse(text: str) -> Any:
    """Parse json, with objects as tuples of pairs and numbers as written; raise
    ValueError.

    Only the constants that are not json (NaN, Infinity) become floats.
    """
    try:
        return json.loads(
            text,
            # Pairs, since a dict would hide a name that is written twice.
            object_pairs_hook=tuple,
            parse_int=str,
            parse_float=str,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not a table: nested too deeply") from error


def _read_json(path: Path, file: IO[bytes]) -> Table:
    try:
        records = _parse(file.read().decode(errors=BYTES))
    except ValueError as error:
        raise UsageError(path, str(error), JSON_ADVICE) from error
    if not isinstance(records, list):
        raise UsageError(path, "is not a list of objects, one per row", JSON_ADVICE)
    return _json_table(path, enumerate(records, 1))


def _read_jsonl(path: Path, file: IO[bytes]) -> Table:
    return _json_table(path, _jsonl_records(file))


def _jsonl_records(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    # Lines of bytes: text would also be split at U+2028 and the like, which json allows.
    for number, data in enumerate(file, 1):
        line = data.decode(errors=BYTES).removesuffix("\n")
        if line.strip():
            try:
                yield number, _parse(line)
            except ValueError as error:
                yield number, error


def _json_table(path: Path, records: Iterable[tuple[int, Any]]) -> Table:
    """Return the table of records with their lines; an error stands for one that is not
    json.
    """
    faults: list[Fault] = []
    rows = TableRows()
    lines = array("q")
    # The columns are those of all rows; the dict is in the order of the first ones.
    columns: dict[str, None] = {}
    for index, (line, record) in enumerate(records):
        row: dict[str, RawValue] = {}
        lines.append(line)
        if isinstance(record, tuple):
            for name, value in record:
                if name in row:
                    faults.append(Fault(index, name, "appears twice in the row"))
                row[name], reason = _raw_value(value)
                if reason:
                    faults.append(Fault(index, name, reason))
        else:
            broken = isinstance(record, ValueError)
            reason = str(record) if broken else f"is not an object; {JSON_ADVICE}"
            faults.append(Fault(index, "", reason))
        columns |= dict.fromkeys(row)
        rows.append([row.get(name, "") for name in columns])
    refuse(path, "column name", _column_faults(columns))
    rows.columns = tuple(columns)
    return Table(path, tuple(columns), rows, np.array(lines, np.int64), faults)


def _raw_value(value: Any) -> tuple[RawValue, str]:
    """Return a json value as a cell, and what is wrong with it."""
    if value is None:
        return "", ""
    if isinstance(value, bool):
        return str(value).lower(), ""
    if isinstance(value, str):
        return value, text_fault(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value, next(filter(None, map(text_fault, value)), "")
    if isinstance(value, float):
        return "", f"{value} is not valid JSON; write null for an absent value"
    return "", "must be text, a number, true, false, null or a list of texts"
