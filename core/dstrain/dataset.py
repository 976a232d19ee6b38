"""A data set: every row checked before anything is decoded, and cells that worker processes load."""

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.metadata import SUFFIXES, Table, Written, read_metadata, refuse
from dstrain.pictures import LOADER_VERSION, Resolution, fit, load_picture, read_size
from dstrain.sources import Column, Size, Source

HEADER_READERS = 16
"""Threads that read headers; more than processors, because they wait for the disk or the network."""

AXES = ("height", "width")


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is read.

    metadata_path: None looks for base_path/metadata.{csv,json,jsonl}. file_keys: the columns whose files are loaded;
    None loads every one the variant's table reads. extra_inputs: inputs (or columns) the data set must have.
    """

    base_path: Path
    metadata_path: Path | None
    file_keys: tuple[str, ...] | None
    resolution: Resolution
    extra_inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One input of one row before decoding; small to send to a process.

    kind: as in Column. literal: the value of a text, integer or number. files: absolute paths. parameters: all but the
    files' bytes that decides what is loaded, (name, value) pairs; 'sizes' has one (height, width) per file.
    size: (height, width) as loaded, of the first of several pictures; None if there are none.
    """

    kind: str
    literal: Any = None
    files: tuple[str, ...] = ()
    parameters: tuple[tuple[str, Any], ...] = ()
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dataset:
    """Checked rows, input name -> Cell, without the inputs that are absent; `unread_columns` feed no input."""

    table: Table
    rows: tuple[Mapping[str, Cell], ...]
    unread_columns: tuple[str, ...]

    def signature(self, row: int) -> tuple[tuple[str, Any], ...]:
        """Say which inputs a row has and the sizes of its pictures: rows of one signature can share a batch."""
        return tuple(sorted((name, dict(cell.parameters).get("sizes", ())) for name, cell in self.rows[row].items()))


def open_dataset(config: DataConfig, inputs: Mapping[str, Source]) -> Dataset:
    """Read the metadata and check every row against the variant's table of inputs, reading only headers of pictures.

    Raises one UsageError that lists all bad cells as file:row:column: what (the first 50, then a count).
    """
    table = read_metadata(config.metadata_path or find_metadata(config.base_path))
    columns = columns_read(table, config, inputs)
    if not table.rows:
        raise UsageError(str(table.path), "has no rows")
    measured = _measure(table, columns.values(), config.base_path)
    faults: list[str] = []
    rows: list[dict[str, Cell]] = []
    for index, row in enumerate(table.rows):
        cells: dict[str, Cell] = {}
        for name, column in columns.items():
            try:
                cell = _cell(row[column.name], column, config.resolution, measured)
            except ValueError as error:
                faults.append(f"{table.where(index, column.name)}: {error}")
                continue
            if cell is not None:
                cells[name] = cell
        rows.append(cells | _sizes(cells, inputs))
    refuse(str(table.path), "cell", list(dict.fromkeys(faults)))
    read = {column.name for column in columns.values()}
    return Dataset(table, tuple(rows), tuple(name for name in table.columns if name not in read))


def load_cell(cell: Cell) -> Any:
    """Load what a cell holds: its literal, a picture, or a list of pictures. Raises UsageError for a damaged file."""
    if not cell.files:
        return cell.literal
    parameters = dict(cell.parameters)
    pictures = [
        load_picture(Path(file), parameters["mode"], size)
        for file, size in zip(cell.files, parameters["sizes"], strict=True)
    ]
    return pictures if cell.kind == "pictures" else pictures[0]


def find_metadata(base_path: Path) -> Path:
    """Return the one metadata file in a data set's folder; raises UsageError if there is none or more than one."""
    if not base_path.is_dir():
        raise UsageError("--dataset_base_path", f"{base_path} is not a folder")
    found = [path for suffix in SUFFIXES if (path := base_path / f"metadata{suffix}").is_file()]
    if len(found) != 1:
        names = " and ".join(path.name for path in found) or f"no metadata{{{','.join(SUFFIXES)}}}"
        raise UsageError(str(base_path), f"has {names}", "name one with --dataset_metadata_path")
    return found[0]


def columns_read(table: Table, config: DataConfig, inputs: Mapping[str, Source]) -> dict[str, Column]:
    """Return input name -> column for the inputs this data set can give; needs no rows and no files.

    Raises UsageError for a name in file_keys or extra_inputs that fits no column, and for a fixed size that is not a
    multiple of what an input needs.
    """
    known = {name: source for name, source in inputs.items() if isinstance(source, Column)}
    loaded = _files_loaded(table, config.file_keys, known)
    columns: dict[str, Column] = {}
    for name, column in known.items():
        if column.name in table.columns and (column.name in loaded or not column.is_file):
            if column.kind == "frames" or column.pick:
                raise UsageError(f"{table.path}: column {column.name!r}", "videos are not read yet")
            config.resolution.check(column.multiple)
            columns[name] = column
    for wanted in config.extra_inputs:
        _check_extra(wanted, table, known, columns)
    return columns


def _files_loaded(table: Table, keys: tuple[str, ...] | None, known: Mapping[str, Column]) -> set[str]:
    files = {column.name for column in known.values() if column.is_file}
    for key in keys or ():
        if key not in table.columns:
            raise _no_column("--data_file_keys", key, table)
        if key not in files:
            readable = f"columns this variant loads files from: {', '.join(sorted(files)) or 'none'}"
            raise UsageError(
                "--data_file_keys", f"no input loads a file from column {key!r}{nearest(key, files)}", readable
            )
    return files if keys is None else set(keys)


def _check_extra(wanted: str, table: Table, known: Mapping[str, Column], columns: Mapping[str, Column]) -> None:
    """Refuse an extra input that is not among the columns read, saying which of the reasons it is."""
    flag = "--extra_inputs"
    matching = [name for name, column in known.items() if wanted in (name, column.name)]
    if not matching:
        hint = nearest(wanted, {*known, *(column.name for column in known.values())})
        raise UsageError(flag, f"this variant reads no input {wanted!r}{hint}", f"inputs: {', '.join(known)}")
    if not any(name in columns for name in matching):
        column = known[matching[0]].name
        if column in table.columns:
            raise UsageError(flag, f"{wanted!r} is loaded from column {column!r}, which --data_file_keys leaves out")
        raise _no_column(flag, column, table)


def _no_column(flag: str, name: str, table: Table) -> UsageError:
    columns = f"columns: {', '.join(table.columns) or 'none'}"
    return UsageError(flag, f"{table.path.name} has no column {name!r}{nearest(name, table.columns)}", columns)


@dataclass(frozen=True)
class _Picture:
    path: str
    size: tuple[int, int]


def _measure(table: Table, columns: Iterable[Column], base_path: Path) -> dict[str, _Picture | str]:
    """Find each file named in these columns once and read its header: name as written -> picture, or what is wrong."""
    names: dict[str, None] = {}
    for column in columns:
        if column.is_file:
            for row in table.rows:
                try:
                    names.update(dict.fromkeys(_file_names(row[column.name], column)))
                except ValueError:
                    continue  # reported with its row
    if not names:
        return {}
    if not base_path.is_dir():
        raise UsageError("--dataset_base_path", f"{base_path} is not a folder")
    with ThreadPoolExecutor(HEADER_READERS) as readers:
        return dict(zip(names, readers.map(partial(_inspect, os.path.realpath(base_path)), names), strict=True))


def _inspect(base: str, name: str) -> _Picture | str:
    try:
        path = os.path.realpath(os.path.join(base, name))
        if not os.path.join(path, "").startswith(os.path.join(base, "")):
            return f"{name!r} leads out of the data set's folder, to {path}"
        if not stat.S_ISREG(os.stat(path).st_mode):
            return f"{name!r} is not a regular file"
        return _Picture(path, read_size(Path(path)))
    except FileNotFoundError:
        return f"no such file {name!r}"
    except UsageError as error:
        return f"{name!r} {error.what}"
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}"


def _cell(
    value: Written, column: Column, resolution: Resolution, measured: Mapping[str, _Picture | str]
) -> Cell | None:
    """Read one cell; None if it is absent. Raises ValueError saying what is wrong."""
    if column.is_file:
        return _picture_cell(_file_names(value, column), column, resolution, measured)
    if column.kind == "texts":
        return Cell("texts", _texts(value))
    if not isinstance(value, str):
        raise ValueError(f"is a list, but a {column.kind} is one value")
    if column.kind == "text":
        if re.search("[\ud800-\udfff]", value):
            raise ValueError("has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        return Cell("text", value)
    text = value.strip()
    return Cell(column.kind, _integer(text) if column.kind == "integer" else _number(text)) if text else None


def _picture_cell(
    names: list[str], column: Column, resolution: Resolution, measured: Mapping[str, _Picture | str]
) -> Cell | None:
    pictures: list[_Picture] = []
    for name in names:
        found = measured[name]
        if isinstance(found, str):
            raise ValueError(found)
        pictures.append(found)
    if not pictures:
        return None
    try:
        sizes = tuple(fit(picture.size, resolution, column.multiple) for picture in pictures)
    except UsageError as error:
        raise ValueError(error.what) from error
    parameters = (("loader", LOADER_VERSION), ("mode", column.mode), ("sizes", sizes))
    return Cell(column.kind, None, tuple(picture.path for picture in pictures), parameters, sizes[0])


def _file_names(value: Written, column: Column) -> list[str]:
    """Return the file names in a cell, none if it is blank; a list in csv is written as json."""
    if isinstance(value, str) and not value.strip():
        return []
    if column.kind == "picture":
        if not isinstance(value, str):
            raise ValueError("is a list, but one picture is read here")
        return [value]
    names = _texts(value)
    if not all(name.strip() for name in names):
        raise ValueError("has a file name that is blank")
    return names


def _texts(value: Written) -> list[str]:
    """Return the texts in a cell: a list (in csv written as json); a single one is a list of one, a blank cell none."""
    texts: Any = value
    if isinstance(value, str):
        texts = [value] if value.strip() else []
        if value.strip().startswith("[") and value.strip().endswith("]"):
            try:
                texts = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'is no list of texts such as ["a.png", "b.png"]: {error}') from error
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("has an entry that is no text")
    return list(texts)


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{text!r} is not an integer (of at most 18 digits)")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or "_" in text:
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _sizes(cells: Mapping[str, Cell], inputs: Mapping[str, Source]) -> dict[str, Cell]:
    """Return the inputs measured on pictures of a row as integer cells."""
    measured: dict[str, Cell] = {}
    for name, source in inputs.items():
        if isinstance(source, Size) and source.of in cells and (size := cells[source.of].size):
            measured[name] = Cell("integer", size[AXES.index(source.axis)])
    return measured
