"""A data set: every row checked before anything is decoded, and cells that worker processes load."""

import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from dstrain.cells import Cell, Footage, file_names, picture_cell, read_literal
from dstrain.clips import FrameSampling
from dstrain.errors import UsageError, nearest
from dstrain.metadata import SUFFIXES, Table, Written, read_metadata, refuse
from dstrain.pictures import Resolution, read_size
from dstrain.sources import Column, Setting, Size, Source
from dstrain.videos import Video, probe

HEADER_READERS = 16
"""Threads that read headers; more than processors, because they wait for the disk or the network."""


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is read.

    metadata_path: None looks for base_path/metadata.{csv,json,jsonl}. file_keys: the columns whose files are loaded;
    None loads every one the variant's table reads. extra_inputs: inputs (or columns) the data set must have.
    sampling: the clips that videos are cut into.
    """

    base_path: Path
    metadata_path: Path | None
    file_keys: tuple[str, ...] | None
    resolution: Resolution
    extra_inputs: tuple[str, ...] = ()
    sampling: FrameSampling = field(default_factory=FrameSampling)


@dataclass(frozen=True)
class Dataset:
    """Checked samples, input name -> Cell, without the inputs that are absent; `unread_columns` feed no input.

    A row with a video gives one sample for each of its clips, any other row one. places: the (row, chunk) of each
    sample, rows of the table and clips of the row counted from 0. alike: the inputs whose values are equal in all
    samples of a batch.
    """

    table: Table
    rows: tuple[Mapping[str, Cell], ...]
    places: tuple[tuple[int, int], ...]
    unread_columns: tuple[str, ...]
    alike: frozenset[str] = frozenset()

    def signature(self, sample: int) -> tuple[tuple[str, Any], ...]:
        """Say which inputs a sample has, the sizes of its files and what must be alike: such samples share a batch."""
        cells = self.rows[sample].items()
        told = ((n, cell.literal if n in self.alike else cell.shapes) for n, cell in cells)
        return tuple(sorted(told, key=itemgetter(0)))


def open_dataset(config: DataConfig, inputs: Mapping[str, Source]) -> Dataset:
    """Read the metadata and check every row against the variant's table of inputs, reading only headers of pictures.

    Raises one UsageError that lists all bad cells as file:row:column: what (the first 50, then a count).
    """
    return check_rows(read_metadata(config.metadata_path or find_metadata(config.base_path)), config, inputs)


def check_rows(table: Table, config: DataConfig, inputs: Mapping[str, Source]) -> Dataset:
    """Check every row of a table as `open_dataset` does."""
    columns = columns_read(table, config, inputs)
    if not table.rows:
        raise UsageError(str(table.path), "has no rows")
    measured = _measure(table, columns.values(), config.base_path)
    constant = {name: _constant(source) for name, source in inputs.items() if isinstance(source, Setting)}
    faults: list[str] = []
    rows: list[dict[str, Cell]] = []
    places: list[tuple[int, int]] = []
    for index, row in enumerate(table.rows):
        cells: dict[str, Cell] = {}
        footage: dict[str, Footage] = {}
        for name, column in columns.items():
            try:
                found = _read(row[column.name], column, config.resolution, measured)
            except ValueError as error:
                faults.append(f"{table.where(index, column.name)}: {error}")
                continue
            if isinstance(found, Footage):
                footage[name] = found
            elif found is not None:
                cells[name] = found
        for chunk, clip in enumerate(_clips(footage, config.sampling)):
            rows.append(cells | clip | _sizes(cells | clip, inputs) | constant)
            places.append((index, chunk))
    refuse(str(table.path), "cell", list(dict.fromkeys(faults)))
    read = {column.name for column in columns.values()}
    unread = tuple(name for name in table.columns if name not in read)
    alike = frozenset(name for name, column in columns.items() if column.alike)
    return Dataset(table, tuple(rows), tuple(places), unread, alike)


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

    Raises UsageError for a name in file_keys or extra_inputs that fits no column, and for a fixed size or a number of
    frames that an input cannot have.
    """
    sources = {name: source for name, source in inputs.items() if isinstance(source, Column)}
    known = {name: _completed(column, sources.values()) for name, column in sources.items()}
    loaded = _files_loaded(table, config.file_keys, known)
    columns: dict[str, Column] = {}
    for name, column in known.items():
        asked = not column.extra or name in config.extra_inputs
        if asked and column.name in table.columns and (column.name in loaded or not column.is_file):
            config.resolution.check(column.multiple)
            if from_video(column):
                config.sampling.check(column.frames)
            columns[name] = column
    for wanted in config.extra_inputs:
        _check_extra(wanted, table, known, columns)
    return columns


def _completed(column: Column, others: Iterable[Column]) -> Column:
    """A column; a picture picked from a video is cut out of it as it is loaded, at its size and frame rate."""
    whole = next((other for other in others if other.kind == "frames" and other.name == column.name), None)
    if not column.pick or whole is None:
        return column
    return replace(column, multiple=whole.multiple, frames=whole.frames, fps=whole.fps)


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


@dataclass(frozen=True)
class _Footage:
    path: str
    video: Video


_Name = tuple[str, bool]
"""A file as written in the metadata, and whether it is read as a video."""
_Measured = Mapping[_Name, _Picture | _Footage | str]


def from_video(column: Column) -> bool:
    """Whether the column names a video, whose frames or one frame of which are loaded."""
    return column.kind == "frames" or bool(column.pick)


def _measure(table: Table, columns: Iterable[Column], base_path: Path) -> _Measured:
    """Find each file named in these columns once and read its header, or packets: name -> it, or what is wrong."""
    names: dict[_Name, None] = {}
    for column in columns:
        if column.is_file:
            for row in table.rows:
                try:
                    named = file_names(row[column.name], column)
                except ValueError:
                    continue  # reported with its row
                names.update(dict.fromkeys((name, from_video(column)) for name in named))
    if not names:
        return {}
    if not base_path.is_dir():
        raise UsageError("--dataset_base_path", f"{base_path} is not a folder")
    with ThreadPoolExecutor(HEADER_READERS) as readers:
        return dict(zip(names, readers.map(partial(_inspect, os.path.realpath(base_path)), names), strict=True))


def _inspect(base: str, named: _Name) -> _Picture | _Footage | str:
    name, is_video = named
    path = ""
    try:
        path = _inside(base, name)
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not (is_video and stat.S_ISDIR(mode)):
            return f"{name!r} is not a regular file{' or a folder of frames' if is_video else ''}"
        if not is_video:
            return _Picture(path, read_size(Path(path)))
        video = probe(Path(path))
        for file in video.files:
            _inside(base, file)
        return _Footage(path, video)
    except FileNotFoundError:
        return f"no such file {name!r}"
    except UsageError as error:
        part = f": {Path(error.where).name}" if path and error.where != path else ""
        return f"{name!r}{part} {error.what}"
    except (OSError, ValueError) as error:
        return f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}"


def _inside(base: str, name: str) -> str:
    """The real path of a file below `base`; raises UsageError for one that lies elsewhere."""
    path = os.path.realpath(os.path.join(base, name))
    if not os.path.join(path, "").startswith(os.path.join(base, "")):
        raise UsageError(name, f"leads out of the data set's folder, to {path}")
    return path


def _read(value: Written, column: Column, resolution: Resolution, measured: _Measured) -> Cell | Footage | None:
    """Read one cell; None if it is absent. Raises ValueError saying what is wrong."""
    if not column.is_file:
        cell = read_literal(value, column)
        fault = column.check(cell.literal) if column.check is not None and cell is not None else ""
        if fault:
            raise ValueError(fault)
        return cell
    pictures: list[_Picture] = []
    for name in file_names(value, column):
        found = measured[name, from_video(column)]
        if isinstance(found, str):
            raise ValueError(found)
        if isinstance(found, _Footage):
            return Footage.of(column, resolution, found.path, found.video)
        pictures.append(found)
    files, sizes = [picture.path for picture in pictures], [picture.size for picture in pictures]
    return picture_cell(column, resolution, files, sizes) if pictures else None


def _clips(footage: Mapping[str, Footage], sampling: FrameSampling) -> Iterator[dict[str, Cell]]:
    """The cells of each sample of a row: all its videos are cut at the same places, as far as the shortest goes."""
    if not footage:
        yield {}
        return
    total = min(len(video.shown) for video in footage.values())
    stride = math.lcm(*(video.column.frames or 1 for video in footage.values()))
    for clip in sampling.clips(total, stride):
        yield {name: video.cell(clip) for name, video in footage.items()}


def _sizes(cells: Mapping[str, Cell], inputs: Mapping[str, Source]) -> dict[str, Cell]:
    """Return the inputs measured on pictures and videos of a sample as integer cells."""
    measured: dict[str, Cell] = {}
    for name, source in inputs.items():
        if isinstance(source, Size) and source.of in cells and (size := cells[source.of].size):
            axes = {"height": size[0], "width": size[1], "frames": cells[source.of].frames}
            measured[name] = Cell("integer", axes[source.axis])
    return measured


def _constant(source: Setting) -> Cell:
    kind = "text" if isinstance(source.value, str) else "number" if isinstance(source.value, float) else "integer"
    return Cell(kind, source.value)
