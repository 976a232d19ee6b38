"""Check every row of a table against the inputs of a variant, before anything is decoded."""

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from dstrain.console import counted
from dstrain.data.cells import Cell, file_names
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import CheckedSample, Dataset
from dstrain.data.files import DataRoots, FileInspector
from dstrain.data.images import Resolution, Size
from dstrain.data.row_samples import (
    clips_of,
    distinct,
    inconsistencies,
    read_row,
    short_videos,
    too_short,
    variants_of,
)
from dstrain.data.table import Fault, Table
from dstrain.data.tables import Reading, Source, find_source, left_out, main_column
from dstrain.data.tables.form import Form
from dstrain.data.variants import NO_AUGMENTATION, AugmentationOptions, CaptionOptions
from dstrain.errors import UsageError, nearest
from dstrain.graph import Column, Input, MaskColumn, with_measured

MAX_COLUMNS_SHOWN = 50
CheckInputs = Callable[[frozenset[str], tuple[str, ...]], object]
"""Raises UsageError where a run cannot do with these inputs of a table with these columns."""


@dataclass(frozen=True)
class DataConfig:
    """Where a dataset is, and how it is read."""

    base_path: Path
    metadata_path: Path | None
    """None looks in base_path for what `find_source` finds."""
    file_keys: tuple[str, ...] | None
    """The columns whose files are loaded; None loads all that the variant has inputs for."""
    resolution: Resolution
    extra_inputs: tuple[str, ...] = ()
    """Optional inputs, or their columns, that the dataset must have."""
    sampling: FrameSampling = field(default_factory=FrameSampling)
    roots: tuple[Path, ...] = ()
    """Folders beside base_path that may hold files."""
    forms: tuple[Form, ...] = ()
    """The forms of plugins, which also fetch files named by URL; without them, URLs are
    refused."""
    form: str | None = None
    """The name of its form, where it is chosen."""
    on_bad_sample: Literal["error", "skip"] = "error"
    pads_texts: bool = False
    """As in Dataset."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """As in Reading."""
    default_caption: str | None = None
    """As in Reading."""
    further_resolutions: tuple[Resolution, ...] = ()
    """Others at which each row gives a sample, too, where they give another size."""
    captions: CaptionOptions = field(default_factory=CaptionOptions)
    caption_inputs: frozenset[str] = frozenset()
    """The inputs that are captions."""
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    may_lack_masks: bool = False
    """Whether it may have no column of masks, as one of several datasets."""

    @property
    def source(self) -> Source:
        """Return where the rows are; raises UsageError if they are nowhere."""
        return find_source(
            self.base_path,
            self.metadata_path,
            roots=self.roots,
            forms=self.forms,
            chosen=self.form,
        )

    @property
    def fetches(self) -> bool:
        """Return whether files may be fetched, and are kept."""
        return any(form.keeps is not None for form in self.forms)

    @property
    def reading(self) -> Reading:
        """Return how they are read as a table."""
        return Reading(self.columns, self.default_caption, self.roots)

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        """Return all resolutions."""
        return (self.resolution, *self.further_resolutions)


def open_dataset(
    config: DataConfig,
    inputs: Mapping[str, Input],
    check_inputs: CheckInputs | None = None,
) -> Dataset:
    """Read the metadata and check every row; of files only the headers are read.

    Raises one UsageError that lists the bad values as file:row:column: reason.

    check_inputs: Refuses a set of inputs that the run cannot do with; it decides
        which columns must exist and which cells must not be blank.
    """
    table = read_table(config, inputs)
    try:
        return check_rows(table, config, inputs, check_inputs)
    except UsageError as error:
        # Together, so that all is mended at once.
        if config.source.form == "folder" and error.where == str(table.path):
            error.help_lines += tuple(filter(None, [left_out(table.path, inputs)]))
        raise


def read_table(config: DataConfig, inputs: Mapping[str, Input]) -> Table:
    """Read the rows of a dataset of any form; raises UsageError and SystemFault."""
    source = config.source
    wanted = None
    if source.has_contents:
        # Files are written for the columns that are used alone.
        header = config.reading.read_columns(source, inputs)
        columns = input_columns(header, config, inputs).values()
        wanted = [column.name for column in columns]
    return config.reading.read(source, inputs, wanted)


def without_absent(
    table: Table, config: DataConfig, inputs: Mapping[str, Input]
) -> tuple[Table, list[str]]:
    """Return the table without the rows that name files which are not on this machine,
    and these files.
    """
    roots = DataRoots.of(config.base_path, (*config.roots, *table.roots), config.forms)
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
    missing = _missing_inputs(table, columns, inputs, check_inputs)
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
) -> Iterator[CheckedSample]:
    """Yield the samples of all rows; add what is wrong to the faults."""
    unreadable = {(fault.row, fault.column) for fault in table.faults}
    inspector = FileInspector(
        columns.values(), config.base_path, (*config.roots, *table.roots), config.forms
    )
    captions = dict.fromkeys(config.caption_inputs, config.captions)
    rows = inspector.with_files(table.rows)
    with_progress = counted("check rows", rows, len(table.rows))
    for number, (values, files) in enumerate(with_progress):
        readable = columns
        if unreadable:
            readable = {
                name: column
                for name, column in columns.items()
                if not unreadable & {(number, ""), (number, column.name)}
            }
        found = [
            read_row(number, values, readable, captions, resolution, files)
            for resolution in config.resolutions
        ]
        # Where another resolution has a size for them, small images are no fault.
        large = [row for row in found if not row.is_too_small] or found[:1]
        chunk = 0
        earlier: list[tuple[dict[str, Cell], dict[str, Size]]] = []
        for row in large:
            faults += row.faults
            faults += inconsistencies(number, row.cells, columns)
            faults += short_videos(number, row.videos, inputs, config.sampling)
            for name in missing(frozenset(row.blank)):
                faults.append(Fault(number, columns[name].name, "is blank"))
            # Two resolutions may have the same size for it; their clips are then equal.
            if row.as_loaded in earlier:
                continue
            earlier.append(row.as_loaded)
            for clips in distinct(clips_of(row.videos, config.sampling)):
                faults += too_short(number, clips, columns)
                cells = row.cells | clips
                variants = variants_of(row, cells, inputs, config.augmentation)
                yield CheckedSample((number, chunk), variants, row.cropped)
                chunk += 1


def input_columns(
    table: Table, config: DataConfig, inputs: Mapping[str, Input]
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
    if not config.may_lack_masks:
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
        _check_views(column, config.augmentation)
        if column.from_video:
            config.sampling.check(column.frame_multiple)
        columns[name] = column
    for wanted in config.extra_inputs:
        if not any(wanted in (name, one.name) for name, one in columns.items()):
            raise UsageError(
                "--extra_inputs",
                f"no column of {table.path.name} gives input {wanted!r}",
                f"inputs: {', '.join(known)}; columns: {', '.join(table.names_in_file)}; "
                f"columns whose files are loaded: {', '.join(sorted(loaded)) or 'none'}",
            )
    return columns


def _check_views(column: Column, augmentation: AugmentationOptions) -> None:
    """Refuse crops of an image that the variant reads at its own size: those of the row
    would show different parts. A mask is cropped as what it is of. Tensors are of the
    plain image: no view of them is made.
    """
    name = repr(column.name)
    crops, flag, what = augmentation.crops > 1, "", ""
    if isinstance(column, MaskColumn):
        return
    if column.directed and augmentation.flip:
        flag, what = "--flip", f"column {name} says a direction, which is not mirrored"
    elif column.kind == "tensors" and augmentation != NO_AUGMENTATION:
        flag = "--crops" if crops else "--flip"
        what = f"the tensors of column {name} are of the images as they are"
    elif crops and column.is_file and not column.multiple:
        flag, what = "--crops", f"the images of column {name} keep their size"
    if flag:
        raise UsageError(flag, what, f"leave it out with column {name}")


def _check_masks(
    table: Table, known: Mapping[str, Column], present: Mapping[str, Column]
) -> None:
    """Refuse masks whose column is absent, unless that of what they mask is, too."""
    for name, column in known.items():
        is_absent = isinstance(column, MaskColumn) and name not in present
        if is_absent and column.of in present:
            raise absent_masks(column.name, f"{table.path.name} has no", table.columns)


def absent_masks(column: str, where: str, columns: Sequence[str]) -> UsageError:
    """Return the error of masks whose column is absent.

    where: What lacks it: 'metadata.csv has no'.
    """
    return UsageError(
        "--mask_column",
        f"{where} column {column!r}{nearest(column, columns)}",
        f"columns: {', '.join(columns)}",
        "a row without a mask has a blank value there",
        "images in a folder with captions may have an alpha channel: --alpha_mask",
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
        names = ", ".join(map(repr, table.names_in_file[:MAX_COLUMNS_SHOWN]))
        advice = f"columns of {table.path.name}: {names}"
        for column in map(main_column, (inputs, inputs), (True, False)):
            if column is not None and column.name not in table.columns:
                what = f"there is no column {column.name!r}"
                other = f"one of another name is read with --column {column.name}=NAME"
                raise UsageError(table.path, what, advice, other) from error
        raise UsageError(table.path, error.what, *error.help_lines, advice) from error

    @cache
    def missing(blank: frozenset[str]) -> list[str]:
        if problem(blank) is None:
            return []
        return [name for name in columns if name in blank and problem((name,))]

    return missing
