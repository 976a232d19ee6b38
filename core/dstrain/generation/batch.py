"""Generate an image or video for each row of a table, as a dataset to train on.

The folder gets files named by a hash of what each row gives, so that the same command
resumes where it stopped, and regenerates only what a changed row asks for; and at the
end metadata.csv, the table with a column for these files.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.schema import GenerateConfig
from dstrain.console import get_logger, progress_bar
from dstrain.data.cells import Cell, file_names, input_key, load_cell
from dstrain.data.dataset import DataConfig, check_rows
from dstrain.data.images import Resolution
from dstrain.data.metadata import Table, read_metadata
from dstrain.data.output import save_image_or_video
from dstrain.errors import StateError, UsageError
from dstrain.generation.inputs import flag_for, flag_values, input_names, parse_inputs
from dstrain.generation.source import (
    PipelineSource,
    check_used,
    open_source,
    sampling_arguments,
)
from dstrain.graph.inputs import FILE_KINDS, Column, Constant, as_column
from dstrain.models.locate import component_digests
from dstrain.pipeline.sampling import Sampling, plan_inference
from dstrain.storage.files import lock, remove_leftovers, write_file, write_json
from dstrain.storage.hashing import Digests, hash_json
from dstrain.training.distill import DIRECT_DISTILL, NOISE_COLUMNS

logger = get_logger(__name__)


SETTINGS = "generated.json"
NAME_LENGTH = 16
ENDINGS: Mapping[str, str] = MappingProxyType({"image": ".png", "video": ".mp4"})
"""Column of the generated files -> their ending."""


@dataclass(frozen=True)
class DatasetJob:
    """A checked table, and the files to generate for it."""

    table: Table
    rows: Sequence[Mapping[str, Cell]]
    """The cells of each row, by the name of an input or a field of `Sampling`."""
    column: str
    """The column of the generated files."""
    files: Sequence[str]
    """The generated file of each row, relative to the folder."""
    row_files: Mapping[str, Path]
    """Files, and folders of frames, that rows name: place relative to the folder -> where
    they are.
    """


def generate_dataset(config: GenerateConfig, metadata: Path) -> None:
    """Generate the files that the folder --output lacks; raises DstrainError before
    anything is loaded.

    Raises StateError for a folder whose files were generated with other settings,
    naming them.
    """
    table = read_metadata(metadata)
    folder = config.output
    if folder.resolve() in (metadata.parent.resolve(), metadata.resolve().parent):
        what = f"{folder} contains {metadata.name}, the table itself"
        raise UsageError("--output", what, "give another folder")
    names = {*input_names(config), *table.columns}
    with open_source(config, names) as source, lock(folder):
        digests = Digests.remembered(folder / "digests.json")
        shared = {**parse_inputs(config, source.spec), **sampling_arguments(config)}
        job = prepare(table, source, shared, digests)
        settings = _settings(source, digests)
        _check_settings(folder, settings)
        missing = {}
        for row, name in enumerate(job.files):
            if not (folder / name).is_file():
                missing[name] = row
        count = len(job.files)
        logger.info(f"Generating {len(missing)} of {count} files into {folder}")
        digests.save()
        _copy_row_files(job, folder)
        pipeline = source.load() if missing else None
        # Not before loading succeeds: a folder without files is bound to no settings.
        write_json(folder / SETTINGS, settings)
        if pipeline is not None:
            generate_missing(job, missing, folder, partial(pipeline, **shared))
        _write_metadata(job, folder)


def prepare(
    table: Table, source: PipelineSource, shared: Mapping[str, Any], digests: Digests
) -> DatasetJob:
    """Check the whole table, and name each row's file, without loading anything.

    Args:
        table: The table.
        source: The pipeline.
        shared: The arguments of inference that all rows share.
        digests: The digests of files known so far.
    """
    where = str(table.path)
    column = "video" if source.spec.makes_video else "image"
    if column in table.columns:
        what = f"has a column {column!r}, which is the one generated"
        raise UsageError(where, what, "remove it")
    if "seed" not in table.columns:
        raise UsageError(where, "has no column 'seed', which decides each row's noise")
    columns = _columns(table, source, shared)
    rows = _rows(table, source, shared, columns)
    files = []
    for cells in rows:
        keys = {name: input_key(cell, digests) for name, cell in cells.items()}
        name = hash_json("row", keys)[:NAME_LENGTH]
        files.append(f"{column}/{name}{ENDINGS[column]}")
    return DatasetJob(table, rows, column, files, _row_files(table, columns))


def _columns(
    table: Table, source: PipelineSource, shared: Mapping[str, Any]
) -> dict[str, Column]:
    """Return the table's columns that inference reads, by name; warn of those that
    neither it nor distillation reads.
    """
    inputs = source.spec.inputs
    call = plan_inference(source.spec, {**dict.fromkeys(inputs, ""), **shared})
    columns: dict[str, Column] = {}
    for name in table.columns:
        if name in call.plan.used_inputs and not isinstance(inputs[name], Constant):
            columns[name] = as_column(name, inputs[name])
            if name in input_names(source.config):
                what = f"is also a column of {table.path}"
                raise UsageError(flag_for(source.config, name), what)
        elif name in NOISE_COLUMNS:
            columns[name] = NOISE_COLUMNS[name]
        elif name not in DIRECT_DISTILL.inputs:
            what = (
                f"column {name!r} is not used for generation, and is copied unchanged"
            )
            logger.warning(f"{table.path}: {what}")
    return columns


def _rows(
    table: Table,
    source: PipelineSource,
    shared: Mapping[str, Any],
    columns: Mapping[str, Column],
) -> Sequence[Mapping[str, Cell]]:
    """Return the cells of every row, after checking that each is enough for inference."""
    size = Resolution(source.config.height, source.config.width, sys.maxsize)
    data_config = DataConfig(table.path.parent, None, None, size)
    rows = check_rows(table, data_config, columns).rows
    blank = [index for index, cells in enumerate(rows) if "seed" not in cells]
    if blank:
        where = table.where(blank[0], "seed")
        raise UsageError(where, f"is blank, in {len(blank)} rows")
    used: set[str] = set()
    for inputs in {frozenset(cells) - set(NOISE_COLUMNS) for cells in rows}:
        arguments = {**shared, **dict.fromkeys(inputs, "")}
        call = plan_inference(source.spec, arguments, table.columns)
        used |= call.plan.used_inputs
    check_used(source.config, source.spec, used)
    return rows


def _row_files(table: Table, columns: Mapping[str, Column]) -> dict[str, Path]:
    """Return `DatasetJob.row_files`; raise UsageError for a name outside the table's
    folder, by which a copy would not be found.
    """
    found: dict[str, Path] = {}
    for column in columns.values():
        if not column.is_file:
            continue
        for index, row in enumerate(table.rows):
            for name in file_names(row[column.name], column):
                place = os.path.normpath(name)
                if os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
                    where = table.where(index, column.name)
                    what = f"{name!r} would not be found in the generated dataset"
                    line = "give a path relative to the table's folder, and inside it"
                    raise UsageError(where, what, line)
                found[place] = table.path.parent / name
    return found


def _settings(source: PipelineSource, digests: Digests) -> dict[str, Any]:
    """Return what decides the generated files and all rows share, as flat JSON data."""
    config, spec = source.config, source.spec
    found = source.find()
    fields = set(Sampling.__dataclass_fields__) - {"seed"}
    settings: dict[str, Any] = {"family": spec.family, "variant": spec.variant}
    for name, digest in component_digests(found, digests).items():
        settings[f"files of {name}"] = digest
    settings["LoRA"] = [[digests.of(lora.path), lora.scale] for lora in config.lora]
    settings["dtype"] = str(source.dtype).removeprefix("torch.")
    settings |= {name: constant.value for name, constant in spec.settings.items()}
    for name, value in spec.defaults.items():
        if name in fields or name in spec.inputs:
            settings[name] = value
    settings |= flag_values(config)
    texts: dict[str, list[str]] = {}
    for item in config.input:
        column = as_column(item.name, spec.inputs[item.name])
        is_file = column.kind in FILE_KINDS
        text = digests.of_all([Path(item.text)]) if is_file else item.text
        texts.setdefault(item.name, []).append(text)
    settings |= texts
    for name, value in sampling_arguments(config).items():
        if name in fields:
            settings[name] = value
    # As they are read back: with lists in place of tuples.
    stored: dict[str, Any] = json.loads(json.dumps(settings))
    return stored


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder with another dataset, or with files of other or unknown settings."""
    path, metadata = folder / SETTINGS, folder / "metadata.csv"
    advice = "give another --output"
    if not path.is_file():
        if metadata.is_file():
            what = "is of a dataset that was not generated here, and was not modified"
            raise UsageError(metadata, what, advice)
        return
    patterns = (
        f"{column}/{'[0-9a-f]' * NAME_LENGTH}{ending}"
        for column, ending in ENDINGS.items()
    )
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        return
    try:
        before = json.loads(path.read_bytes())
        if not isinstance(before, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        what = f"is damaged, so the settings of the files there are unknown: {error}"
        raise StateError(path, what, advice) from error
    differences = [
        f"{name}: there {before.get(name)}, this run {settings.get(name)}"
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]
    if differences:
        what = "was generated with other settings"
        raise StateError(folder, what, "; ".join(differences), advice)


def _copy_row_files(job: DatasetJob, folder: Path) -> None:
    """Copy the files that rows name to the same places in the folder, so that it is a
    dataset by itself.
    """
    for place, path in sorted(job.row_files.items()):
        if not path.is_dir():
            _copy(path, folder / place)
            continue
        for frame in sorted(path.iterdir()):
            if not frame.name.startswith("."):
                _copy(frame, folder / place / frame.name)


def _copy(path: Path, copy: Path) -> None:
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_file(copy, path.read_bytes())
    elif copy.read_bytes() != path.read_bytes():
        what = f"differs from {path}, of which it should be a copy"
        raise StateError(copy, what, "remove one of them")


def generate_missing(
    job: DatasetJob,
    missing: Mapping[str, int],
    folder: Path,
    inference: Callable[..., Any],
) -> None:
    """Generate each missing file, whole or not at all.

    Args:
        job: The dataset.
        missing: Missing file -> its row.
        folder: The folder of the dataset.
        inference: The pipeline with the arguments that all rows share.
    """
    (folder / job.column).mkdir(exist_ok=True)
    remove_leftovers(folder / job.column)
    with progress_bar("generate", len(missing)) as progress:
        for name, row in missing.items():
            arguments = {key: load_cell(cell) for key, cell in job.rows[row].items()}
            save_image_or_video(inference(**arguments), folder / name)
            progress.update()


def _write_metadata(job: DatasetJob, folder: Path) -> None:
    """Write the table with the column of generated files; lists as JSON."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*job.table.columns, job.column))
    for row, file in zip(job.table.rows, job.files, strict=True):
        cells = [row[name] for name in job.table.columns]
        texts = [cell if isinstance(cell, str) else json.dumps(cell) for cell in cells]
        writer.writerow((*texts, file))
    write_file(folder / "metadata.csv", text.getvalue().encode())
