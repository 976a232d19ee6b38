"""Generate an image or video for each row of a table, as a dataset to train on.

The folder gets files named by a hash of what each row gives, so that the same command
resumes where it stopped, and regenerates only what a changed row asks for; and at the
end metadata.csv, the table with a column for these files.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.config.schema import GenerateConfig
from dstrain.console import get_logger, progress_bar
from dstrain.data.cells import Cell, file_names, input_key, load_cell
from dstrain.data.dataset import check_rows
from dstrain.data.metadata import Table, read_metadata
from dstrain.data.output import save_image_or_video
from dstrain.errors import StateError, UsageError
from dstrain.generation.inputs import (
    data_config,
    flag_for,
    flag_values,
    input_names,
    parse_inputs,
)
from dstrain.generation.source import (
    PipelineSource,
    check_used,
    open_source,
    sampling_arguments,
)
from dstrain.graph.inputs import Column, Constant, as_column
from dstrain.models.locate import component_digests
from dstrain.pipeline.sampling import plan_inference
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
                missing[name] = job.rows[row]
        count = len(job.files)
        logger.info(f"Generating {len(missing)} of {count} files into {folder}")
        digests.save()
        for name, path in job.row_files.items():
            _copy(path, folder / name)
        if missing:
            pipeline = source.load()
            (folder / job.column).mkdir(exist_ok=True)
            remove_leftovers(folder / job.column)
            with progress_bar("generate", len(missing)) as progress:
                for name, cells in missing.items():
                    inputs = {key: load_cell(cell) for key, cell in cells.items()}
                    output = pipeline(**(shared | inputs))
                    # Only now: a folder without files is bound to no settings.
                    write_json(folder / SETTINGS, settings)
                    save_image_or_video(output, folder / name)
                    progress.update()
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
    column = "video" if source.spec.makes_video else "image"
    if column in table.columns:
        what = f"has a column {column!r}, which is the one generated"
        raise UsageError(table.path, what, "remove it")
    columns = _columns(table, source, shared)
    rows = _rows(table, source, shared, columns)
    files = []
    for cells in rows:
        keys = {name: input_key(cell, digests) for name, cell in cells.items()}
        name = hash_json("row", keys)[:NAME_LENGTH] + ENDINGS[column]
        files.append(f"{column}/{name}")
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
    spec = source.spec

    def used_inputs(inputs: Iterable[str], _: tuple[str, ...]) -> frozenset[str]:
        if "seed" not in inputs:
            what = "has no column 'seed', which decides each row's noise"
            raise UsageError(table.path, what)
        values = dict.fromkeys(set(inputs) - set(NOISE_COLUMNS), "")
        return plan_inference(
            spec, {**shared, **values}, table.columns
        ).plan.used_inputs

    config = data_config(source.config, table.path.parent)
    rows = check_rows(table, config, columns, used_inputs).rows
    check_used(source.config, spec, used_inputs(columns, table.columns))
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
                    raise UsageError(
                        table.where(index, column.name),
                        f"{name!r} would not be found in the generated dataset",
                        "give a path relative to the table's folder, and inside it",
                    )
                found[place] = table.path.parent / name
    return found


def _settings(source: PipelineSource, digests: Digests) -> dict[str, Any]:
    """Return what decides the generated files and all rows share, as flat JSON data."""
    config, spec = source.config, source.spec
    settings: dict[str, Any] = {"family": spec.family, "variant": spec.variant}
    for name, digest in component_digests(source.find(), digests).items():
        settings[f"files of {name}"] = digest
    settings["LoRA"] = [[digests.of(lora.path), lora.scale] for lora in config.lora]
    settings["dtype"] = str(source.dtype).removeprefix("torch.")
    settings |= {name: constant.value for name, constant in spec.settings.items()}
    settings |= spec.defaults
    settings |= flag_values(config)
    texts: dict[str, list[str]] = {}
    for item in config.input:
        text = item.text
        if as_column(item.name, spec.inputs[item.name]).is_file:
            text = digests.of_all([Path(text)])
        texts.setdefault(item.name, []).append(text)
    sampling = sampling_arguments(config)
    del sampling["seed"]  # each row has its own
    return settings | texts | sampling


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder with another dataset, or with files of other or unknown settings."""
    path, metadata = folder / SETTINGS, folder / "metadata.csv"
    advice = "give another --output"
    if not path.is_file():
        if metadata.is_file():
            what = "is of a dataset that was not generated here, and was not modified"
            raise UsageError(metadata, what, advice)
        return
    try:
        before = json.loads(path.read_bytes())
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


def _copy(path: Path, copy: Path) -> None:
    """Copy a file, or a folder of frames, so that the folder is a dataset by itself."""
    if path.is_dir():
        for frame in path.iterdir():
            if not frame.name.startswith("."):
                _copy(frame, copy / frame.name)
    elif not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_file(copy, path.read_bytes())
    elif copy.read_bytes() != path.read_bytes():
        what = f"differs from {path}, of which it should be a copy"
        raise StateError(copy, what, "remove one of them")


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
