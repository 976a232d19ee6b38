"""A data set: every row checked before anything is decoded, and cells that worker
processes load.
"""

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
from dstrain.data.files import FileInfos, ImageFile, VideoFile, inspect_files
from dstrain.data.images import Resolution
from dstrain.data.metadata import SUFFIXES, Fault, RawValue, Table, read_metadata
from dstrain.data.required import CheckInputs, no_columns, required_columns
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Constant, Input, Measured

OnBadSample = Literal["error", "skip"]


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is read.

    metadata_path: None looks for base_path/metadata.{csv,json,jsonl}. file_keys: the
    columns whose files are loaded; None loads every one the variant's table reads.
    extra_inputs: inputs (or columns) the data set must have. sampling: the clips that
    videos are cut into. roots: other folders that files may lie in. url_cache: where
    files named by URL are kept; None refuses them. on_bad: whether a bad row is refused
    or left out.
    """

    base_path: Path
    metadata_path: Path | None
    file_keys: tuple[str, ...] | None
    resolution: Resolution
    extra_inputs: tuple[str, ...] = ()
    sampling: FrameSampling = field(default_factory=FrameSampling)
    roots: tuple[Path, ...] = ()
    url_cache: Path | None = None
    on_bad_sample: OnBadSample = "error"


@dataclass(frozen=True)
class Dataset:
    """Checked samples, input name -> Cell, without the inputs that are absent;
    `unread_columns` feed no input.

    A row with a video gives one sample for each of its clips, any other row one.
    places: the (row, chunk) of each sample, rows of the table and clips of the row
    counted from 0. alike: the inputs whose values are equal in all samples of a batch.
    columns: input -> the column it is read from. left_out: why rows of the table give
    no sample.
    """

    table: Table
    rows: tuple[Mapping[str, Cell], ...]
    sample_ids: tuple[tuple[int, int], ...]
    unused_columns: tuple[str, ...]
    same_in_batch: frozenset[str] = frozenset()
    columns: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[Fault, ...] = ()

    def signature(self, sample: int) -> tuple[tuple[str, Any], ...]:
        """Say which inputs a sample has, the sizes of its files and what must be alike:
        such samples share a batch.
        """
        cells = self.rows[sample].items()
        told = (
            (n, cell.literal if n in self.same_in_batch else cell.shapes)
            for n, cell in cells
        )
        return tuple(sorted(told, key=itemgetter(0)))

    def fault(self, row: int, name: str, error: UsageError) -> Fault:
        """What is wrong with the cell of an input that could not be loaded."""
        column = self.columns[name]
        written = self.table.rows[row][column]
        file = (
            shown(written)
            if isinstance(written, str) and "[" not in written
            else Path(error.where).name
        )
        return Fault(row, column, f"{file!r} {error.what}")

    def damage(self, row: int, name: str, error: UsageError) -> UsageError:
        """The error of a cell that could not be loaded, with its place in the metadata;
        of what is not in it, as is.
        """
        if row >= len(self.table.rows):
            return error
        fault = self.fault(row, name, error)
        return UsageError(
            self.table.where(row, fault.column), fault.reason, *error.help_lines
        )

    def without(self, faults: Iterable[Fault]) -> "Dataset":
        """The data set without these rows, whole ones; raises UsageError naming all of
        them if none is left.
        """
        left_out = tuple(dict.fromkeys([*self.skipped, *faults]))
        bad = {fault.row for fault in left_out}
        kept = [
            number for number, (row, _) in enumerate(self.sample_ids) if row not in bad
        ]
        if not kept:
            self.table.refuse(left_out)
        rows, places = (
            tuple(self.rows[number] for number in kept),
            tuple(self.sample_ids[number] for number in kept),
        )
        return replace(
            self,
            rows=rows,
            sample_ids=places,
            skipped=tuple(sorted(left_out, key=lambda fault: fault.row)),
        )


def open_dataset(
    config: DataConfig, inputs: Mapping[str, Input], planned: CheckInputs | None = None
) -> Dataset:
    """Read the metadata and check every row against the variant's table of inputs,
    reading only headers of pictures.

    planned: refuses columns before any row is checked, and so tells which cells must
    not be blank. Raises one UsageError that lists all bad cells as file:row:column:
    what (the first 50, then a count).
    """
    table = read_metadata(config.metadata_path or find_metadata(config.base_path))
    return check_rows(table, config, inputs, planned)


def check_rows(
    table: Table,
    config: DataConfig,
    inputs: Mapping[str, Input],
    planned: CheckInputs | None = None,
) -> Dataset:
    """Check every row of a table as `open_dataset` does."""
    columns = input_columns(table, config, inputs)
    if not table.rows:
        raise UsageError(str(table.path), "has no rows")
    if not columns and any(isinstance(source, Column) for source in inputs.values()):
        raise no_columns(table, inputs)
    lacking = required_columns(table, columns, inputs, planned)
    measured = inspect_files(
        table, columns.values(), config.base_path, config.roots, config.url_cache
    )
    constant = {
        name: Cell(source.kind, source.value)
        for name, source in inputs.items()
        if isinstance(source, Constant)
    }
    unread = {(fault.row, fault.column) for fault in table.faults}
    faults = list(table.faults)
    rows: list[dict[str, Cell]] = []
    places: list[tuple[int, int]] = []
    for index, row in enumerate(table.rows):
        cells: dict[str, Cell] = {}
        footage: dict[str, ResampledVideo] = {}
        whole = {} if (index, "") in unread else columns
        blank = set(whole)
        for name, column in whole.items():
            try:
                found = _read(row[column.name], column, config.resolution, measured)
            except ValueError as error:
                if (index, column.name) not in unread:
                    faults.append(Fault(index, column.name, str(error)))
                blank.remove(name)
                continue
            if isinstance(found, ResampledVideo):
                footage[name] = found
            elif found is not None:
                cells[name] = found
            if found is not None or (index, column.name) in unread:
                blank.remove(name)
        faults += [
            Fault(index, columns[name].name, "is blank")
            for name in lacking(frozenset(blank))
        ]
        for chunk, clip in enumerate(_clips(footage, config.sampling)):
            rows.append(cells | clip | _sizes(cells | clip, inputs) | constant)
            places.append((index, chunk))
    if config.on_bad_sample == "error":
        table.refuse(faults)
    read = {name: column.name for name, column in columns.items()}
    unfed = tuple(name for name in table.columns if name not in read.values())
    alike = frozenset(name for name, column in columns.items() if column.same_in_batch)
    return Dataset(table, tuple(rows), tuple(places), unfed, alike, read).without(
        faults
    )


def find_metadata(base_path: Path) -> Path:
    """Return the one metadata file in a data set's folder; raises UsageError if there
    is none or more than one.
    """
    if not base_path.is_dir():
        raise UsageError("--dataset_base_path", f"{base_path} is not a folder")
    found = [
        path
        for suffix in SUFFIXES
        if (path := base_path / f"metadata{suffix}").is_file()
    ]
    if len(found) != 1:
        names = (
            " and ".join(path.name for path in found)
            or f"no metadata{{{','.join(SUFFIXES)}}}"
        )
        stems = {
            path.stem for path in base_path.iterdir() if path.suffix.lower() != ".txt"
        }
        texts = [
            path.name for path in sorted(base_path.glob("*.txt")) if path.stem in stems
        ]
        advice = (
            [
                "captions in files of their own, as in "
                + texts[0]
                + ", are not read: docs/guide/datasets.md has six "
                "lines of Python that write metadata.jsonl from them"
            ]
            if texts and not found
            else []
        )
        raise UsageError(
            str(base_path),
            f"has {names}",
            "name one with --dataset_metadata_path",
            *advice,
        )
    return found[0]


def input_columns(
    table: Table, config: DataConfig, inputs: Mapping[str, Input]
) -> dict[str, Column]:
    """Return input name -> column for the inputs this data set can give; needs no rows
    and no files.

    Raises UsageError for a name in file_keys or extra_inputs that fits no column, and
    for a fixed size or a number of frames that an input cannot have.
    """
    sources = {
        name: source for name, source in inputs.items() if isinstance(source, Column)
    }
    known = {
        name: _completed(column, sources.values()) for name, column in sources.items()
    }
    loaded = _files_loaded(table, config.file_keys, known)
    columns: dict[str, Column] = {}
    for name, column in known.items():
        asked = not column.optional or name in config.extra_inputs
        if (
            asked
            and column.name in table.columns
            and (column.name in loaded or not column.is_file)
        ):
            config.resolution.check(column.multiple)
            if column.from_video:
                config.sampling.check(column.frame_multiple)
            columns[name] = column
    for wanted in config.extra_inputs:
        _check_extra(wanted, table, known, columns)
    return columns


def _completed(column: Column, others: Iterable[Column]) -> Column:
    """A column; a picture picked from a video is cut out of it as it is loaded, at its
    size and frame rate.
    """
    whole = next(
        (
            other
            for other in others
            if other.kind == "video" and other.name == column.name
        ),
        None,
    )
    if not column.frame or whole is None:
        return column
    return replace(
        column,
        multiple=whole.multiple,
        frame_multiple=whole.frame_multiple,
        fps=whole.fps,
    )


def _files_loaded(
    table: Table, keys: tuple[str, ...] | None, known: Mapping[str, Column]
) -> set[str]:
    files = {column.name for column in known.values() if column.is_file}
    for key in keys or ():
        if key not in table.columns:
            raise _no_column("--data_file_keys", key, table)
        if key not in files:
            readable = f"columns this variant loads files from: {', '.join(sorted(files)) or 'none'}"
            raise UsageError(
                "--data_file_keys",
                f"no input loads a file from column {key!r}{nearest(key, files)}",
                readable,
            )
    return files if keys is None else set(keys)


def _check_extra(
    wanted: str,
    table: Table,
    known: Mapping[str, Column],
    columns: Mapping[str, Column],
) -> None:
    """Refuse an extra input that is not among the columns read, saying which of the
    reasons it is.
    """
    flag = "--extra_inputs"
    matching = [name for name, column in known.items() if wanted in (name, column.name)]
    if not matching:
        hint = nearest(wanted, {*known, *(column.name for column in known.values())})
        raise UsageError(
            flag,
            f"this variant reads no input {wanted!r}{hint}",
            f"inputs: {', '.join(known)}",
        )
    if not any(name in columns for name in matching):
        column = known[matching[0]].name
        if column in table.columns:
            raise UsageError(
                flag,
                f"{wanted!r} is loaded from column {column!r}, which --data_file_keys leaves out",
            )
        raise _no_column(flag, column, table)


def _no_column(flag: str, name: str, table: Table) -> UsageError:
    columns = f"columns: {', '.join(table.columns) or 'none'}"
    return UsageError(
        flag,
        f"{table.path.name} has no column {name!r}{nearest(name, table.columns)}",
        columns,
    )


def _read(
    value: RawValue, column: Column, resolution: Resolution, measured: FileInfos
) -> Cell | ResampledVideo | None:
    """Read one cell; None if it is absent. Raises ValueError saying what is wrong."""
    if not column.is_file:
        return read_literal(value, column)
    images: list[ImageFile] = []
    for name in file_names(value, column):
        found = measured[name, column.from_video]
        if isinstance(found, str):
            raise ValueError(found + _list_hint(name, column, found))
        if isinstance(found, VideoFile):
            return ResampledVideo.of(column, resolution, found.path, found.video)
        images.append(found)
    files, sizes = (
        [image.path for image in images],
        [image.size for image in images],
    )
    return image_cell(column, resolution, files, sizes) if images else None


def _list_hint(name: str, column: Column, fault: str) -> str:
    """How a list is written, for a name that was meant as one."""
    if fault.startswith("no such file") and any(sign in name for sign in ",;|["):
        return (
            '; a list is written ["a.png", "b.png"]'
            if column.kind == "images"
            else "; one file is read here"
        )
    return ""


def _clips(
    footage: Mapping[str, ResampledVideo], sampling: FrameSampling
) -> Iterator[dict[str, Cell]]:
    """The cells of each sample of a row: all its videos are cut at the same places, as
    far as the shortest goes.
    """
    if not footage:
        yield {}
        return
    total = min(len(video.frame_indices) for video in footage.values())
    stride = math.lcm(*(video.column.frame_multiple or 1 for video in footage.values()))
    for clip in sampling.clips(total, stride):
        yield {name: video.cell(clip) for name, video in footage.items()}


def _sizes(cells: Mapping[str, Cell], inputs: Mapping[str, Input]) -> dict[str, Cell]:
    """Return the inputs measured on pictures and videos of a sample as integer cells."""
    measured: dict[str, Cell] = {}
    for name, source in inputs.items():
        if (
            isinstance(source, Measured)
            and source.of in cells
            and (size := cells[source.of].size)
        ):
            axes = {
                "height": size[0],
                "width": size[1],
                "frames": cells[source.of].frames,
            }
            measured[name] = Cell("integer", axes[source.axis])
    return measured
