"""`dstrain generate --dataset`: a picture or video for each row of a table, written as
a data set to train on.

FOLDER/metadata.csv has the table's columns and one for what was made; it is written
last. A file is named by a hash of what its row gives, so that the same command goes on
where it stopped, and makes anew what a changed row asks for.
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
from dstrain.console import Progress, get_logger
from dstrain.data.cells import Cell, file_names, input_key, load_cell
from dstrain.data.dataset import DataConfig, check_rows
from dstrain.data.images import Resolution
from dstrain.data.metadata import Table, read_metadata
from dstrain.data.output import save_image_or_video
from dstrain.errors import StateError, UsageError
from dstrain.generation.inputs import NAMED, flag_for, input_names, parse_inputs
from dstrain.generation.source import (
    PipelineSource,
    check_used,
    open_source,
    sampling_arguments,
)
from dstrain.graph.inputs import FILE_KINDS, Column, Constant, as_column
from dstrain.graph.plan import make_plan
from dstrain.models.locate import component_digests, find
from dstrain.pipeline.sampling import Sampling, generate_task, plan_inference
from dstrain.storage.files import lock, remove_leftovers, write_file, write_json
from dstrain.storage.hashing import Digests, hash_json
from dstrain.training.distill import DIRECT_DISTILL, NOISE_COLUMNS

logger = get_logger(__name__)


SETTINGS = "generated.json"
NAME_LENGTH = 16
ENDINGS: Mapping[str, str] = MappingProxyType({"image": ".png", "video": ".mp4"})
"""Column of what is made -> the ending of its files."""


@dataclass(frozen=True)
class DatasetJob:
    """What is made: the table, each row's cells by the name of an input or a field of
    `Sampling`, each row's file.

    named: what rows name, a file or a folder of frames: its place as written -> where
    it is.
    """

    table: Table
    rows: Sequence[Mapping[str, Cell]]
    column: str
    files: Sequence[str]
    named: Mapping[str, Path]


def generate_dataset(config: GenerateConfig, metadata: Path) -> None:
    """Make what the table lacks in the folder --output; raises a DstrainError before
    anything is loaded.

    Raises StateError for a folder whose files were made by other settings, naming them.
    """
    table = read_metadata(metadata)
    folder = config.output
    if folder.resolve() in (metadata.parent.resolve(), metadata.resolve().parent):
        raise UsageError(
            "--output",
            f"{folder} holds {metadata.name}, the table itself",
            "give another folder",
        )
    with (
        open_source(config, {*input_names(config), *table.columns}) as source,
        lock(folder),
    ):
        digests = Digests.remembered(folder / "digests.json")
        shared = {**parse_inputs(config, source.spec), **sampling_arguments(config)}
        job = prepare(table, source, shared, digests)
        settings = _settings(source, digests)
        _check_settings(folder, settings)
        missing = {
            name: i for i, name in enumerate(job.files) if not (folder / name).is_file()
        }
        logger.info(f"{len(job.files)} rows, {len(missing)} to make; {folder}")
        digests.save()
        _copy_inputs(job, folder)
        pipeline = source.load() if missing else None
        write_json(folder / SETTINGS, settings)  # not before something is made by them
        if pipeline is not None:
            generate_missing(job, missing, folder, partial(pipeline, **shared))
        _write_metadata(job, folder)


def prepare(
    table: Table, source: PipelineSource, shared: Mapping[str, Any], digests: Digests
) -> DatasetJob:
    """Check the whole table, and name each row's file, without loading anything."""
    made = "video" if source.spec.makes_video else "image"
    if made in table.columns:
        raise UsageError(
            str(table.path),
            f"has a column {made!r}, which is what is made",
            "leave it out",
        )
    if "seed" not in table.columns:
        raise UsageError(
            str(table.path),
            "has no column 'seed', which each row's noise is drawn from",
        )
    columns = _columns(table, source, shared)
    rows = _rows(table, source, shared, columns)
    keys = [
        hash_json("row", {n: input_key(cell, digests) for n, cell in cells.items()})[
            :NAME_LENGTH
        ]
        for cells in rows
    ]
    return DatasetJob(
        table,
        rows,
        made,
        [f"{made}/{key}{ENDINGS[made]}" for key in keys],
        _named(table, columns),
    )


def _columns(
    table: Table, source: PipelineSource, shared: Mapping[str, Any]
) -> dict[str, Column]:
    """The table's columns that inference reads, by name; warns of those that nothing
    reads, nor distillation.
    """
    config, spec = source.config, source.spec
    used = plan_inference(
        spec, {**dict.fromkeys(spec.inputs, ""), **shared}
    ).plan.used_inputs
    inputs = {
        name: spec.inputs[name]
        for name in used
        if not isinstance(spec.inputs[name], Constant)
    }
    columns = {
        name: as_column(name, inputs[name]) for name in table.columns if name in inputs
    }
    for name in columns:
        if name in input_names(config):
            raise UsageError(
                flag_for(config, name), f"is also a column of {table.path}"
            )
    for name in table.columns:
        if name not in columns and name not in DIRECT_DISTILL.inputs:
            what = f"column {name!r} decides nothing of what is made, and is copied as it is"
            logger.warning(f"{table.path}: {what}")
    return columns | {
        name: column for name, column in NOISE_COLUMNS.items() if name in table.columns
    }


def _rows(
    table: Table,
    source: PipelineSource,
    shared: Mapping[str, Any],
    columns: Mapping[str, Column],
) -> Sequence[Mapping[str, Cell]]:
    """The cells of every row, once each has been found to give what inference needs."""
    size = Resolution(source.config.height, source.config.width, sys.maxsize)
    rows = check_rows(
        table, DataConfig(table.path.parent, None, None, size), columns
    ).rows
    blank = [index for index, cells in enumerate(rows) if "seed" not in cells]
    if blank:
        raise UsageError(
            table.where(blank[0], "seed"), f"is blank, in {len(blank)} rows"
        )
    used: set[str] = set()
    for inputs in {frozenset(cells) - set(NOISE_COLUMNS) for cells in rows}:
        used |= plan_inference(
            source.spec, {**shared, **dict.fromkeys(inputs, "")}, table.columns
        ).plan.used_inputs
    check_used(source.config, source.spec, used)
    return rows


def _named(table: Table, columns: Mapping[str, Column]) -> dict[str, Path]:
    """What rows name, as `Making` has it; raises UsageError for a name by which no copy
    of it could be found.
    """
    found: dict[str, Path] = {}
    for column in columns.values():
        for index, row in enumerate(table.rows if column.is_file else ()):
            for name in file_names(row[column.name], column):
                place = os.path.normpath(name)
                if os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
                    what = f"{name!r} would not be found in the data set that is made"
                    raise UsageError(
                        table.where(index, column.name),
                        what,
                        "name the file from the table's folder on",
                    )
                found[place] = table.path.parent / name
    return found


def _settings(source: PipelineSource, digests: Digests) -> dict[str, Any]:
    """What all rows have in common and decides what is made, as flat JSON data."""
    config, spec = source.config, source.spec
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    found = find(
        source.family,
        source.models,
        plan.components[""],
        plan.configs[""],
        spec.components,
    )
    given = {
        name: getattr(config, name)
        for name in NAMED
        if getattr(config, name) is not None
    }
    for item in config.input:
        kind = (
            as_column(item.name, spec.inputs[item.name]).kind
            if item.name in spec.inputs
            else "text"
        )
        given.setdefault(item.name, []).append(
            digests.of_all([Path(item.text)]) if kind in FILE_KINDS else item.text
        )
    fields = set(Sampling.__dataclass_fields__) - {"seed"}
    defaults = {
        name: value
        for name, value in spec.defaults.items()
        if name in {*fields, *spec.inputs}
    }
    constants = {name: setting.value for name, setting in spec.settings.items()}
    sampling = {
        name: value
        for name, value in sampling_arguments(config).items()
        if name in fields
    }
    settings = {
        "family": spec.family,
        "variant": spec.variant,
        **{
            f"files of {name}": digest
            for name, digest in component_digests(found, digests).items()
        },
        "LoRA": [[digests.of(lora.path), lora.scale] for lora in config.lora],
        "dtype": str(source.dtype).removeprefix("torch."),
        **constants,
        **defaults,
        **given,
        **sampling,
    }
    as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return as_read


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that holds something else: another data set, or files made by
    other settings, or unknown ones.
    """
    record, metadata = folder / SETTINGS, folder / "metadata.csv"
    if not record.is_file():
        if metadata.is_file():
            what = "holds a data set that was not made here; what is there is left as it is"
            raise UsageError(str(metadata), what, "give another --output")
        return
    if not any(
        any((folder / made).glob("[0-9a-f]" * NAME_LENGTH + ending))
        for made, ending in ENDINGS.items()
    ):
        return
    try:
        before = json.loads(record.read_bytes())
    except ValueError as error:
        raise _damaged(record, str(error)) from error
    if not isinstance(before, dict):
        raise _damaged(record, "it is no JSON object")
    names = [
        name
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]
    if names:
        words = [
            f"{name}: there {before.get(name)}, this run {settings.get(name)}"
            for name in names
        ]
        raise StateError(
            str(folder),
            "was made by other settings",
            "; ".join(words),
            "give another --output",
        )


def _damaged(record: Path, reason: str) -> StateError:
    return StateError(
        str(record),
        f"is damaged, and tells no settings by which the files there were made: {reason}",
        "give another --output",
    )


def _copy_inputs(job: DatasetJob, folder: Path) -> None:
    """Copy what rows name into the folder, at the same places, so that it is a data set
    by itself.
    """
    for place, path in sorted(job.named.items()):
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
        raise StateError(
            str(copy),
            f"differs from {path}, of which it should be a copy",
            "remove one of them",
        )


def generate_missing(
    job: DatasetJob,
    missing: Mapping[str, int],
    folder: Path,
    inference: Callable[..., Any],
) -> None:
    """Make each missing file, whole or not at all."""
    (folder / job.column).mkdir(exist_ok=True)
    remove_leftovers(folder / job.column)
    with Progress("generate", total=len(missing)) as progress:
        for name, row in missing.items():
            own = {field: load_cell(cell) for field, cell in job.rows[row].items()}
            save_image_or_video(inference(**own), folder / name)
            progress.step()


def _write_metadata(job: DatasetJob, folder: Path) -> None:
    """Write the table with the column of what was made; a cell that is a list is
    written as JSON.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow((*job.table.columns, job.column))
    for row, file in zip(job.table.rows, job.files, strict=True):
        cells = (row[name] for name in job.table.columns)
        rows.writerow(
            (
                *(
                    cell if isinstance(cell, str) else json.dumps(cell)
                    for cell in cells
                ),
                file,
            )
        )
    write_file(folder / "metadata.csv", text.getvalue().encode())
