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
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain import DIRECT_DISTILL, Diverged, Pipeline, StateError, UsageError
from dstrain.cache import lock, replacing
from dstrain.data import Cell, Table, input_key, load_cell
from dstrain.generation import (
    SAMPLING,
    Digests,
    PipelineSource,
    as_column,
    check_rows,
    check_used,
    data_config,
    file_names,
    flag_for,
    flag_values,
    hash_json,
    input_names,
    input_texts,
    noticing,
    open_source,
    parse_arguments,
    plan_inference,
    read_metadata,
    seeded_noise,
    spellings,
)
from dstrain.plugin import (
    Column,
    Constant,
    FlowMatchSchedule,
    GenerateConfig,
    get_logger,
    progress_bar,
    remove_leftovers,
    save_image_or_video,
    write_json,
)
from dstrain.plugin.commands import number_of, secret_error, secrets
from torch import Tensor

from dstrain_tools.options import EULER, TeacherOptions
from dstrain_tools.teacher.trajectories import student_steps, write_trajectory

logger = get_logger("dstrain.generate")


SETTINGS = "generated.json"
TRAJECTORY = "trajectory"
DISTILL = DIRECT_DISTILL.inputs
"""The columns that direct distillation reads."""
NOISE = ("seed", "rand_device")
"""The columns that decide a row's initial noise."""
NAME_LENGTH = 16


def generate_dataset(config: GenerateConfig) -> None:
    """Generate the files that the folder --output lacks; raises DstrainError before
    anything is loaded.

    Raises StateError for a folder whose files were generated with other settings,
    naming them.
    """
    own = config.of(TeacherOptions)
    assert own.dataset is not None
    table = read_metadata(own.dataset)
    folder = config.output
    for value, variable in secrets().items():
        for number, row in enumerate(table.rows):
            if value in str(row):
                raise secret_error(table.where(number), variable)
    with open_source(config, table.columns) as source, lock(folder):
        if source.spec.makes_layers:
            what = f"variant {source.spec.variant} generates several images for a row"
            raise UsageError("--dataset", what, "generate them one by one")
        column = "image"
        suffix = ".png"
        if source.spec.makes_video:
            column = "video"
            suffix = ".mp4"
        generated = (column, TRAJECTORY) if own.trajectory else (column,)
        for name in generated:
            if name in table.columns:
                what = f"has a column {name!r}, which is the one to generate"
                raise UsageError(table.path, what, "remove it")
        is_flow = isinstance(source.spec.schedule, FlowMatchSchedule)
        if own.trajectory and not is_flow:
            what = "follows Euler's rule of flow matching, which this model has not"
            raise UsageError("--trajectory", what, "leave it out")
        steps = student_steps(table) if own.trajectory else []
        digests = Digests(folder / ".digests.npy")
        # Other samplers' paths are not straight between two of their steps.
        is_own = own.trajectory and bool(source.spec.samplers)
        euler = {"sampler": EULER} if is_own else {}
        shared = {**parse_arguments(config, source.spec), **euler}
        columns = _columns(table, source, shared)
        rows = _rows(table, source, shared, columns)
        names = [_name(cells, digests) for cells in rows]
        files = {column: [f"{column}/{name}{suffix}" for name in names]}
        if own.trajectory:
            files[TRAJECTORY] = [
                f"{TRAJECTORY}/{name}-{count}.safetensors"
                for name, count in zip(names, steps, strict=True)
            ]
        row_files = _row_files(table, columns)
        settings = {**_settings(source, digests), **euler}
        if settings.get("sampler") == EULER:
            del settings["sampler"]
        _check_settings(folder, settings)
        of_rows = list(zip(*files.values(), strict=True))
        missing = {
            files_of_row: number
            for number, files_of_row in enumerate(of_rows)
            if not all((folder / name).is_file() for name in files_of_row)
        }
        files_in_all = number_of(len(rows), "file")
        logger.info(f"generating {len(missing)} of {files_in_all} into {folder}")
        digests.save()
        for name, path in row_files.items():
            _copy(path, folder / name)
        if missing:
            pipeline = source.load()
            for name in generated:
                (folder / name).mkdir(exist_ok=True)
                remove_leftovers(folder / name)
            with progress_bar("generate", len(missing)) as progress:
                for (name, *trajectory), number in missing.items():
                    cells = rows[number]
                    try:
                        output, states = _generate(
                            source, pipeline, shared, cells, name
                        )
                    except (Diverged, StateError) as error:
                        where = f"{table.where(number)}: {error.where}"
                        raise type(error)(
                            where, error.what, *error.help_lines
                        ) from error
                    # Only now: a folder without files is bound to no settings.
                    write_json(folder / SETTINGS, settings)
                    for path in trajectory:
                        schedule = source.spec.schedule
                        write_trajectory(folder / path, schedule, states, steps[number])
                    if not (folder / name).is_file():
                        save_image_or_video(output, folder / name)
                    progress.update()
        _write_metadata(table, files, folder / "metadata.csv")


def _generate(
    source: PipelineSource,
    pipeline: Pipeline,
    shared: Mapping[str, Any],
    cells: Mapping[str, Cell],
    name: str,
) -> tuple[Any, list[Tensor]]:
    """Return the image or video of a row, and the latents that the sampler passed
    through, (1, channels, ...) fp32 on the CPU, from the initial noise on.
    """
    inputs = {key: load_cell(cell) for key, cell in cells.items()}
    path: list[Tensor] = []
    with noticing(source.config, name):
        output = pipeline(
            **{**shared, **inputs},
            on_step=lambda _, latents: path.append(latents.cpu()),
        )
    device = inputs.get("rand_device", "")
    noise = seeded_noise(path[0].shape, inputs["seed"], device)
    return output, [noise.cpu(), *path]


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
        elif name in NOISE:
            columns[name] = as_column(name, DISTILL[name])
        elif name not in DISTILL:
            what = (
                f"column {name!r} is not used for generation, and is copied unchanged"
            )
            logger.warning(f"{table.path}: {what}")
    # Masks come after what they are of, in whichever order the table has them.
    return dict(sorted(columns.items(), key=lambda item: bool(item[1].of)))


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
            what = "has no column 'seed', which determines each row's noise"
            raise UsageError(table.path, what)
        values = dict.fromkeys(set(inputs) - set(NOISE), "")
        return plan_inference(
            spec, {**shared, **values}, table.columns
        ).plan.used_inputs

    config = data_config(source.config, table.path.parent)
    rows = check_rows(table, config, columns, used_inputs).rows
    check_used(source.config, spec, used_inputs(columns, table.columns))
    return rows


def _name(cells: Mapping[str, Cell], digests: Digests) -> str:
    """Return the name of a row's file: the hash of what it is generated from."""
    keys = {name: input_key(cell, digests) for name, cell in cells.items()}
    return hash_json("row", keys)[:NAME_LENGTH]


def _row_files(table: Table, columns: Mapping[str, Column]) -> dict[str, Path]:
    """Return the files, and folders of frames, that rows name: place relative to the
    dataset -> where they are.

    Raises UsageError for a name outside the table's folder, by which a copy would not
    be found.
    """
    found: dict[str, Path] = {}
    for column in columns.values():
        if not column.is_file:
            continue
        for index, row in enumerate(table.rows):
            for name in file_names(row[column.name], column):
                folder = table.path.parent
                there = [one for one in spellings(name) if (folder / one).exists()]
                place = os.path.normpath(there[0] if there else name)
                if os.path.isabs(place) or place.split(os.sep)[0] == os.pardir:
                    raise UsageError(
                        table.where(index, column.name),
                        f"{name!r} would not be found in the generated dataset",
                        "give a path relative to the table's folder, and inside it",
                    )
                found[place] = folder / place
    return found


def _settings(source: PipelineSource, digests: Digests) -> dict[str, Any]:
    """Return what decides the generated files and all rows share, as flat JSON data."""
    config = source.config
    spec = source.spec
    settings: dict[str, Any] = {"family": spec.family, "variant": spec.variant}
    for name, digest in source.digests().items():
        settings[f"files of {name}"] = digest
    settings["LoRA"] = loras = []
    for lora in config.lora:
        # Its content, its scale, and what was said of it where it was named, if anything.
        setting = [digests.of(lora.path), lora.scale]
        options = replace(lora, scale=1.0).changes
        if lora.component or options:
            setting.append(f"{lora.component}{options}")
        loras.append(setting)
    settings["dtype"] = str(source.dtype).removeprefix("torch.")
    settings |= {name: constant.value for name, constant in spec.constants.items()}
    settings |= spec.defaults
    settings |= flag_values(config)
    for name, texts in input_texts(config).items():
        if as_column(name, spec.inputs[name]).is_file:
            texts = [digests.of_all([Path(text)]) for text in texts]
        settings[name] = texts
    settings |= flag_values(config, SAMPLING)
    del settings["seed"]  # each row has its own
    return settings


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder with another dataset, or with files of other or unknown settings."""
    path = folder / SETTINGS
    metadata = folder / "metadata.csv"
    advice = "give another --output"
    if not path.is_file():
        if metadata.is_file():
            what = (
                "belongs to a dataset that was not generated here; it was not modified"
            )
            raise UsageError(metadata, what, advice)
        return
    try:
        # All had it once, and folders of then do not name it.
        before = {"sampler": EULER, **json.loads(path.read_bytes())}
    except ValueError as error:
        what = f"is damaged, so the settings of the files there are unknown: {error}"
        raise StateError(path, what, advice) from error
    now = {"sampler": EULER, **settings}
    differences = [
        f"{name}: existing {before.get(name)}, this run {now.get(name)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differences:
        what = "was generated with different settings"
        raise StateError(folder, what, "; ".join(differences), advice)


def _copy(path: Path, copy: Path) -> None:
    """Copy a file, or a folder of frames, so that the folder is a dataset by itself."""
    if path.is_dir():
        for frame in path.iterdir():
            if not frame.name.startswith("."):
                _copy(frame, copy / frame.name)
    elif not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        _write(copy, path.read_bytes())
    elif copy.read_bytes() != path.read_bytes():
        what = f"differs from {path}, of which it should be a copy"
        raise StateError(copy, what, "remove one of them")


def _write_metadata(
    table: Table, files: Mapping[str, Sequence[str]], path: Path
) -> None:
    """Write the table with the columns of generated files; lists as JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, (*table.columns, *files), lineterminator="\n")
    writer.writeheader()
    for number, row in enumerate(table.rows):
        cells = {column: names[number] for column, names in files.items()}
        for name, cell in row.items():
            cells[name] = cell if isinstance(cell, str) else json.dumps(cell)
        writer.writerow(cells)
    _write(path, text.getvalue().encode())


def _write(path: Path, data: bytes) -> None:
    with replacing(path, len(data)) as building:
        building.write_bytes(data)
