"""Check every row of a table against the inputs of a variant, before anything is decoded."""

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from dstrain.console import counted
from dstrain.data.cells import (
    Cell,
    ResampledVideo,
    file_names,
    image_cell,
    read_literal,
)
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import Dataset
from dstrain.data.files import DataRoots, FileInfos, FileInspector, read_mask
from dstrain.data.images import ImageInfo, Resolution
from dstrain.data.metadata import Fault, RawValue, Table, find_metadata, read_metadata
from dstrain.data.videos import Video
from dstrain.errors import UsageError, first_few, nearest
from dstrain.graph.inputs import (
    Column,
    Constant,
    Input,
    MaskColumn,
    Measured,
    with_measured,
)

MAX_COLUMNS_SHOWN = 50
CheckInputs = Callable[[frozenset[str], tuple[str, ...]], object]
"""Raises UsageError where a run cannot do with these inputs of a table with these columns."""


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
    pads_texts: bool = False
    """As in Dataset."""


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


def without_absent(
    table: Table, config: DataConfig, inputs: Mapping[str, Input]
) -> tuple[Table, list[str]]:
    """Return the table without the rows that name files which are not on this machine,
    and these files.
    """
    roots = DataRoots.of(config.base_path, config.roots, config.url_cache)
    columns = input_columns(table, config, inputs).values()
    absent: dict[str, None] = {}
    kept = array("q")
    unreadable = {fault.row for fault in table.faults}
    for row, values in enumerate(table.rows):
        if row in unreadable:
            kept.append(row)
            continue
        names: list[str] = []
        for column in columns:
            if column.is_file:
                with suppress(ValueError):  # reported when the row is checked
                    names += file_names(values[column.name], column)
        lacking = [name for name in names if name in absent or roots.lacks(name)]
        absent |= dict.fromkeys(lacking)
        if not lacking:
            kept.append(row)
    return table.chosen(np.array(kept, np.int64)), list(absent)


def check_rows(
    table: Table,
    config: DataConfig,
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None = None,
) -> Dataset:
    """Check every row of a table as `open_dataset` does."""
    columns = input_columns(table, config, inputs)
    if not len(table.rows):
        raise UsageError(table.path, "has no rows")
    missing = _missing_inputs(table, config, columns, inputs, check_inputs)
    faults = list(table.faults)
    samples = _samples(table, config, columns, inputs, missing, faults)
    dataset = Dataset.of(table, samples, columns, config.pads_texts)
    if config.on_bad_sample == "error":
        table.refuse(faults)
    return dataset.without(faults)


def _samples(
    table: Table,
    config: DataConfig,
    columns: Mapping[str, Column],
    inputs: Mapping[str, Input],
    missing: Callable[[frozenset[str]], Collection[str]],
    faults: list[Fault],
) -> Iterator[tuple[tuple[int, int], dict[str, Cell]]]:
    """Yield the samples of all rows with their rows and chunks; add what is wrong to the
    faults.
    """
    unreadable = {(fault.row, fault.column) for fault in table.faults}
    inspector = FileInspector(
        columns.values(), config.base_path, config.roots, config.url_cache
    )
    rows = inspector.with_files(table.rows)
    with_progress = counted("check rows", rows, len(table.rows))
    for row, (values, files) in enumerate(with_progress):
        cells: dict[str, Cell] = {}
        videos: dict[str, ResampledVideo] = {}
        blank: set[str] = set()
        for name, column in columns.items():
            if unreadable and unreadable & {(row, ""), (row, column.name)}:
                continue
            found: Cell | ResampledVideo | None
            try:
                if isinstance(column, MaskColumn):
                    masked = cells.get(column.of) or videos.get(column.of)
                    found = read_mask(values, column, columns[column.of], masked, files)
                else:
                    found = _read(values[column.name], column, config.resolution, files)
            except ValueError as error:
                faults.append(Fault(row, column.name, str(error)))
                continue
            if found is None:
                blank.add(name)
            elif isinstance(found, Cell):
                cells[name] = found
            else:
                videos[name] = found
        for name in missing(frozenset(blank)):
            faults.append(Fault(row, columns[name].name, "is blank"))
        for chunk, clips in enumerate(_clips(videos, config.sampling)):
            frames = max((cell.shapes[0][0] for cell in clips.values()), default=0)
            for name in clips:
                if frames < columns[name].least_frames:
                    reason = f"gives {frames} frame, which is {name}: nothing is left to train"
                    faults.append(Fault(row, columns[name].name, reason))
            sample = cells | clips
            yield (row, chunk), sample | _derived(sample, inputs)


def input_columns(
    table: Table,
    config: DataConfig,
    inputs: Mapping[str, Input],
) -> dict[str, Column]:
    """Return input name -> column for the inputs that a dataset can give.

    Reads neither rows nor files. Raises UsageError for a name in file_keys or
    extra_inputs that fits no column, and for a fixed size or a number of frames that an
    input cannot have.
    """
    known = {
        name: as_cut_from_video(source, inputs.values())
        for name, source in inputs.items()
        if isinstance(source, Column)
    }
    present = {
        name: column for name, column in known.items() if column.name in table.columns
    }
    files = {column.name for column in present.values() if column.is_file}
    loaded = files if config.file_keys is None else config.file_keys
    for key in loaded:
        if key not in files:
            raise UsageError(
                "--data_file_keys",
                f"no input loads a file from column {key!r}{nearest(key, files)}",
                f"columns with files: {', '.join(sorted(files)) or 'none'}",
            )
    _check_masks(table, known, present)
    columns: dict[str, Column] = {}
    for name, column in present.items():
        if column.optional and name not in config.extra_inputs:
            continue
        # Masks are loaded where a flag names their column.
        is_mask = isinstance(column, MaskColumn)
        if column.is_file and column.name not in loaded and not is_mask:
            continue
        config.resolution.check(column.multiple)
        if column.from_video:
            config.sampling.check(column.frame_multiple)
        columns[name] = column
    for wanted in config.extra_inputs:
        if not any(wanted in (name, one.name) for name, one in columns.items()):
            raise UsageError(
                "--extra_inputs",
                f"no column of {table.path.name} gives input {wanted!r}",
                f"inputs: {', '.join(known)}",
                f"columns: {', '.join(table.columns)}",
                f"columns whose files are loaded: {', '.join(sorted(loaded)) or 'none'}",
            )
    return columns


def _check_masks(
    table: Table, known: Mapping[str, Column], present: Mapping[str, Column]
) -> None:
    """Refuse masks whose column is absent, unless that of what they mask is, too."""
    for name, column in known.items():
        if not isinstance(column, MaskColumn) or name in present:
            continue
        if column.of in present:
            raise UsageError(
                "--mask_column",
                f"{table.path.name} has no column {column.name!r}{nearest(column.name, table.columns)}",
                f"columns: {', '.join(table.columns)}",
                "a row without a mask has a blank cell there",
            )


def as_cut_from_video(column: Column, others: Iterable[Input]) -> Column:
    """Give an image that is a frame of a loaded video that video's size and frame rate."""
    for video in others:
        if (
            column.frame
            and isinstance(video, Column)
            and (video.kind, video.name) == ("video", column.name)
        ):
            return replace(
                column,
                multiple=video.multiple,
                frame_multiple=video.frame_multiple,
                fps=video.fps,
            )
    return column


def _missing_inputs(
    table: Table,
    config: DataConfig,
    columns: Mapping[str, Column],
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None,
) -> Callable[[frozenset[str]], Collection[str]]:
    """Return a function: the blank inputs of a row -> those of them that the run needs.

    Raises UsageError if the table lacks a column that the run needs.
    """

    def problem(blank: Collection[str]) -> UsageError | None:
        if check_inputs is None:
            return None
        present = with_measured(columns.keys() - set(blank), inputs)
        try:
            check_inputs(present, table.columns)
        except UsageError as error:
            return error
        return None

    error = problem(())
    if error is not None:
        # A column may be absent because only bad rows have it.
        table.refuse(table.faults)
        names = ", ".join(map(repr, table.columns[:MAX_COLUMNS_SHOWN]))
        if len(table.columns) > MAX_COLUMNS_SHOWN:
            names += f" and {len(table.columns) - MAX_COLUMNS_SHOWN} more"
        advice = [*error.help_lines, f"columns of {table.path.name}: {names}"]
        _, absent = without_absent(table, config, inputs)
        if absent:
            many = f"{len(absent)} file{'s' * (len(absent) > 1)}"
            advice.append(f"{many} that it names cannot be found: {first_few(absent)}")
        raise UsageError(table.path, error.what, *advice) from error

    @cache
    def missing(blank: frozenset[str]) -> list[str]:
        if problem(blank) is None:
            return []
        return [name for name in columns if name in blank and problem((name,))]

    return missing


def _read(
    value: RawValue,
    column: Column,
    resolution: Resolution,
    files: FileInfos,
) -> Cell | ResampledVideo | None:
    """Read one cell, None if it is absent; raise ValueError that says what is wrong."""
    if not column.is_file:
        return read_literal(value, column)
    images: list[ImageInfo] = []
    for name in file_names(value, column):
        file = files[name, column.from_video]
        if isinstance(file, str):
            raise ValueError(file)
        if isinstance(file, Video):
            return ResampledVideo.of(column, resolution, file)
        images.append(file)
    return image_cell(column, resolution, images) if images else None


def _clips(
    videos: Mapping[str, ResampledVideo], sampling: FrameSampling
) -> Iterator[dict[str, Cell]]:
    """Yield the clips of each sample of a row; one sample without clips if it has no
    videos.

    All videos of a row are cut at the same places, as far as the shortest one goes.
    """
    if not videos:
        yield {}
        return
    total = min(len(video.frame_indices) for video in videos.values())
    multiples = [video.column.frame_multiple or 1 for video in videos.values()]
    for clip in sampling.clips(total, math.lcm(*multiples)):
        yield {name: video.cell(clip) for name, video in videos.items()}


def _derived(cells: Mapping[str, Cell], inputs: Mapping[str, Input]) -> dict[str, Cell]:
    """Return the inputs of a sample that no column gives: constants and measurements."""
    derived: dict[str, Cell] = {}
    for name, source in inputs.items():
        if isinstance(source, Constant):
            derived[name] = Cell(source.kind, source.value)
        elif isinstance(source, Measured) and source.of in cells:
            frames, height, width = cells[source.of].shapes[0]
            axes = {"height": height, "width": width, "frames": frames}
            derived[name] = Cell("integer", axes[source.axis])
    return derived
