"""Datasets: every row is checked before anything is decoded, and cells load when used."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from dstrain.console import shown
from dstrain.data.cells import (
    Cell,
    ResampledVideo,
    file_names,
    image_cell,
    read_literal,
)
from dstrain.data.clips import FrameSampling
from dstrain.data.files import FileInfos, VideoFile, inspect_files
from dstrain.data.images import Resolution, Size
from dstrain.data.metadata import SUFFIXES, Fault, RawValue, Table, read_metadata
from dstrain.data.required import CheckInputs, no_columns, required_columns
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Constant, Input, Measured

Found = Cell | ResampledVideo | str | None
"""What a cell was found to be: None if it is absent, a str says what is wrong with it."""


@dataclass(frozen=True)
class DataConfig:
    """Where a dataset is, and how it is read."""

    base_path: Path
    metadata_path: Path | None
    """None looks for base_path/metadata.{csv,json,jsonl}."""
    file_keys: tuple[str, ...] | None
    """The columns whose files are loaded; None loads all that the variant has inputs for."""
    resolution: Resolution
    extra_inputs: tuple[str, ...] = ()
    """Optional inputs, or their columns, that the dataset must have."""
    sampling: FrameSampling = field(default_factory=FrameSampling)
    roots: tuple[Path, ...] = ()
    """Folders beside base_path that may hold files."""
    url_cache: Path | None = None
    """Where files named by URL are kept; None refuses URLs."""
    on_bad_sample: Literal["error", "skip"] = "error"


@dataclass(frozen=True)
class Dataset:
    """Checked samples.

    A row with a video gives one sample for each of its clips, any other row gives one.
    """

    table: Table
    rows: tuple[Mapping[str, Cell], ...]
    """The cells of each sample by input, without inputs that are absent."""
    sample_ids: tuple[tuple[int, int], ...]
    """(row, chunk) of each sample: rows of the table and clips of a row, from 0."""
    unused_columns: tuple[str, ...]
    same_in_batch: frozenset[str] = frozenset()
    """Inputs whose values must be equal in all samples of a batch."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Input -> the column it is read from."""
    skipped: tuple[Fault, ...] = ()
    """Why rows of the table give no sample."""

    def signature(self, sample: int) -> tuple[tuple[str, Any], ...]:
        """Return what the samples of a batch have in common: the inputs, the sizes of
        their files, and the values that must be equal.
        """
        common: dict[str, Any] = {}
        for name, cell in self.rows[sample].items():
            common[name] = cell.literal if name in self.same_in_batch else cell.shapes
        return tuple(sorted(common.items(), key=itemgetter(0)))

    def fault(self, row: int, name: str, error: UsageError) -> Fault:
        """Return the fault of an input that could not be loaded."""
        column = self.columns[name]
        value = self.table.rows[row][column]
        file = Path(error.where).name
        if isinstance(value, str) and "[" not in value:
            file = shown(value)
        return Fault(row, column, f"{file!r} {error.what}")

    def damage(self, row: int, name: str, error: UsageError) -> UsageError:
        """Return the error of an input that could not be loaded, with its place in the
        metadata.
        """
        if row >= len(self.table.rows):  # a sample that no row gives, as of previews
            return error
        fault = self.fault(row, name, error)
        place = self.table.where(row, fault.column)
        return UsageError(place, fault.reason, *error.help_lines)

    def without(self, faults: Iterable[Fault]) -> "Dataset":
        """Return the dataset without the rows that have faults.

        Raises UsageError with all faults if no row is left.
        """
        skipped = tuple(dict.fromkeys([*self.skipped, *faults]))
        bad = {fault.row for fault in skipped}
        kept = [i for i, (row, _) in enumerate(self.sample_ids) if row not in bad]
        if not kept:
            self.table.refuse(skipped)
        return replace(
            self,
            rows=tuple(self.rows[i] for i in kept),
            sample_ids=tuple(self.sample_ids[i] for i in kept),
            skipped=tuple(sorted(skipped, key=lambda fault: fault.row)),
        )


def open_dataset(
    config: DataConfig,
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None = None,
) -> Dataset:
    """Read the metadata and check every row; of files only the headers are read.

    Raises one UsageError that lists the bad cells as file:row:column: reason.

    Args:
        config: Where the dataset is.
        inputs: The variant's table of inputs.
        check_inputs: Refuses a set of inputs that the run cannot do with; it decides
            which columns must exist and which cells must not be blank.
    """
    table = read_metadata(config.metadata_path or find_metadata(config.base_path))
    return check_rows(table, config, inputs, check_inputs)


def check_rows(
    table: Table,
    config: DataConfig,
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None = None,
) -> Dataset:
    """Check every row of a table as `open_dataset` does."""
    columns = input_columns(table, config, inputs)
    if not table.rows:
        raise UsageError(table.path, "has no rows")
    if not columns and any(isinstance(source, Column) for source in inputs.values()):
        raise no_columns(table, inputs)
    missing = required_columns(table, columns, inputs, check_inputs)
    files = inspect_files(
        table, columns.values(), config.base_path, config.roots, config.url_cache
    )
    unreadable = {(fault.row, fault.column) for fault in table.faults}
    faults = list(table.faults)
    samples: list[dict[str, Cell]] = []
    sample_ids: list[tuple[int, int]] = []
    for row, values in enumerate(table.rows):
        found = {
            name: _read(values[column.name], column, config.resolution, files)
            for name, column in columns.items()
            if not unreadable & {(row, ""), (row, column.name)}
        }
        problems = {name: one for name, one in found.items() if isinstance(one, str)}
        blank = frozenset(name for name, one in found.items() if one is None)
        problems |= dict.fromkeys(missing(blank), "is blank")
        for name, reason in problems.items():
            faults.append(Fault(row, columns[name].name, reason))
        for chunk, cells in enumerate(_clips(found, config.sampling)):
            samples.append(cells | _derived(cells, inputs))
            sample_ids.append((row, chunk))
    if config.on_bad_sample == "error":
        table.refuse(faults)
    used = {name: column.name for name, column in columns.items()}
    dataset = Dataset(
        table,
        tuple(samples),
        tuple(sample_ids),
        tuple(name for name in table.columns if name not in used.values()),
        frozenset(name for name, column in columns.items() if column.same_in_batch),
        used,
    )
    return dataset.without(faults)


def find_metadata(base_path: Path) -> Path:
    """Return the only metadata file in a folder; raise UsageError if there is none, or
    more than one.
    """
    if not base_path.is_dir():
        raise UsageError("--dataset_base_path", f"{base_path} is not a folder")
    paths = [base_path / f"metadata{suffix}" for suffix in SUFFIXES]
    found = [path for path in paths if path.is_file()]
    if len(found) == 1:
        return found[0]
    advice = ["name one with --dataset_metadata_path"]
    names = " and ".join(path.name for path in found)
    if not found:
        names = f"no metadata{{{','.join(SUFFIXES)}}}"
        advice += _caption_advice(base_path)
    raise UsageError(base_path, f"has {names}", *advice)


def _caption_advice(folder: Path) -> list[str]:
    """Say how captions in a.txt beside a.png become metadata, where there are any."""
    captions = sorted(folder.glob("*.txt"))
    stems = {path.stem for path in folder.iterdir() if path.suffix.lower() != ".txt"}
    names = [path.name for path in captions if path.stem in stems]
    return [
        f"captions in text files such as {name} are not read: docs/guide/datasets.md "
        "shows six lines of Python that write metadata.jsonl from them"
        for name in names[:1]
    ]


def input_columns(
    table: Table, config: DataConfig, inputs: Mapping[str, Input]
) -> dict[str, Column]:
    """Return input name -> column for the inputs that a dataset can give.

    Reads neither rows nor files. Raises UsageError for a name in file_keys or
    extra_inputs that fits no column, and for a fixed size or a number of frames that an
    input cannot have.
    """
    sources = [source for source in inputs.values() if isinstance(source, Column)]
    known = {
        name: _as_cut_from_video(source, sources)
        for name, source in inputs.items()
        if isinstance(source, Column)
    }
    loaded = _loaded_columns(table, config.file_keys, known.values())
    columns: dict[str, Column] = {}
    for name, column in known.items():
        if column.optional and name not in config.extra_inputs:
            continue
        if column.name not in table.columns:
            continue
        if column.is_file and column.name not in loaded:
            continue
        config.resolution.check(column.multiple)
        if column.from_video:
            config.sampling.check(column.frame_multiple)
        columns[name] = column
    for name in config.extra_inputs:
        _check_extra_input(name, table, known, columns)
    return columns


def _as_cut_from_video(column: Column, others: Iterable[Column]) -> Column:
    """Give an image that is a frame of a loaded video that video's size and frame rate."""
    if column.frame:
        for video in others:
            if video.kind == "video" and video.name == column.name:
                return replace(
                    column,
                    multiple=video.multiple,
                    frame_multiple=video.frame_multiple,
                    fps=video.fps,
                )
    return column


def _loaded_columns(
    table: Table, keys: tuple[str, ...] | None, columns: Iterable[Column]
) -> set[str]:
    """Return the columns whose files are loaded; raise UsageError for a wrong key."""
    files = {column.name for column in columns if column.is_file}
    if keys is None:
        return files
    flag = "--data_file_keys"
    for key in keys:
        if key not in table.columns:
            raise _no_column(flag, key, table)
        if key not in files:
            raise UsageError(
                flag,
                f"no input loads a file from column {key!r}{nearest(key, files)}",
                f"columns with files: {', '.join(sorted(files)) or 'none'}",
            )
    return set(keys)


def _check_extra_input(
    wanted: str,
    table: Table,
    known: Mapping[str, Column],
    columns: Mapping[str, Column],
) -> None:
    """Raise UsageError for an extra input that is not read, and say why it is not."""
    flag = "--extra_inputs"
    matching = [name for name, column in known.items() if wanted in (name, column.name)]
    if not matching:
        names = [*known, *(column.name for column in known.values())]
        hint = nearest(wanted, names)
        raise UsageError(
            flag,
            f"this variant has no input {wanted!r}{hint}",
            f"inputs: {', '.join(known)}",
        )
    if columns.keys() & set(matching):
        return
    column = known[matching[0]].name
    if column not in table.columns:
        raise _no_column(flag, column, table)
    raise UsageError(
        flag,
        f"{wanted!r} is loaded from column {column!r}, which is not in --data_file_keys",
    )


def _no_column(flag: str, name: str, table: Table) -> UsageError:
    return UsageError(
        flag,
        f"{table.path.name} has no column {name!r}{nearest(name, table.columns)}",
        f"columns: {', '.join(table.columns) or 'none'}",
    )


def _read(
    value: RawValue, column: Column, resolution: Resolution, files: FileInfos
) -> Found:
    """Read one cell; return what is wrong with it instead of raising."""
    try:
        if not column.is_file:
            return read_literal(value, column)
        images: list[tuple[str, Size]] = []
        for name in file_names(value, column):
            file = files[name, column.from_video]
            if isinstance(file, str):
                return file + _list_hint(name, column, file)
            if isinstance(file, VideoFile):
                return ResampledVideo.of(column, resolution, file.path, file.video)
            images.append((file.path, file.size))
        return image_cell(column, resolution, images) if images else None
    except ValueError as error:
        return str(error)
    except UsageError as error:  # too small for the family
        return error.what


def _list_hint(name: str, column: Column, problem: str) -> str:
    """Say how to write a list, for a missing file whose name looks like one."""
    if not problem.startswith("no such file") or not set(",;|[") & set(name):
        return ""
    if column.kind == "images":
        return '; write a list as ["a.png", "b.png"]'
    return "; this input takes one file"


def _clips(
    found: Mapping[str, Found], sampling: FrameSampling
) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each sample of a row.

    All videos of a row are cut at the same places, as far as the shortest one goes.
    """
    cells = {name: one for name, one in found.items() if isinstance(one, Cell)}
    videos = {
        name: one for name, one in found.items() if isinstance(one, ResampledVideo)
    }
    if not videos:
        yield cells
        return
    total = min(len(video.frame_indices) for video in videos.values())
    multiples = [video.column.frame_multiple or 1 for video in videos.values()]
    for clip in sampling.clips(total, math.lcm(*multiples)):
        yield cells | {name: video.cell(clip) for name, video in videos.items()}


def _derived(cells: Mapping[str, Cell], inputs: Mapping[str, Input]) -> dict[str, Cell]:
    """Return the inputs of a sample that no column gives: constants and measurements."""
    derived: dict[str, Cell] = {}
    for name, source in inputs.items():
        if isinstance(source, Constant):
            derived[name] = Cell(source.kind, source.value)
        elif isinstance(source, Measured) and source.of in cells:
            cell = cells[source.of]
            if cell.size is not None:
                height, width = cell.size
                axes = {"height": height, "width": width, "frames": cell.frames}
                derived[name] = Cell("integer", axes[source.axis])
    return derived
