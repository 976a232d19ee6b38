"""Turn the names and texts of a command line into the inputs of inference."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from dstrain.config.options import GenerateConfig
from dstrain.console import get_logger
from dstrain.data import Resolution, Table, load_cell
from dstrain.data.clips import FrameSampling
from dstrain.data.row_checks import DataConfig, check_rows
from dstrain.data.table import RawValue
from dstrain.errors import UsageError, nearest
from dstrain.graph import Column, LongPrompt, PipelineSpec, noticing_long_prompts
from dstrain.graph.inputs import as_column

logger = get_logger(__name__)
NAMED = ("prompt", "negative_prompt", "height", "width", "num_frames")
"""Inputs that have a flag of their own."""
SAMPLING = (
    "guidance_scale",
    "seed",
    "num_inference_steps",
    "sampler",
    "denoising_strength",
)
"""Options of the sampler."""


def flag_values(config: GenerateConfig, names: Iterable[str] = NAMED) -> dict[str, Any]:
    """Return those options that are given: inputs with own flags, or `SAMPLING`."""
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def flag_for(config: GenerateConfig, name: str) -> str:
    """Return the flag that gives an input: its own, or --input."""
    has_flag = name in flag_values(config) or name in SAMPLING
    return f"--{name}" if has_flag else f"--input {name}"


@contextmanager
def naming_flags(config: GenerateConfig) -> Iterator[None]:
    """Name the flag in a UsageError about an argument: the pipeline knows no flags."""
    try:
        yield
    except UsageError as error:
        if error.where in (*input_names(config), *SAMPLING):
            error.where = flag_for(config, error.where)
        raise


def input_texts(config: GenerateConfig) -> dict[str, list[str]]:
    """Return the texts of the inputs that are given by --input."""
    texts: dict[str, list[str]] = {}
    for item in config.input:
        texts.setdefault(item.name, []).append(item.text)
    return texts


def input_names(config: GenerateConfig) -> list[str]:
    """Return the names of the inputs that a command line gives."""
    return list(flag_values(config) | input_texts(config))


def parse_arguments(config: GenerateConfig, spec: PipelineSpec) -> dict[str, Any]:
    """Return the arguments of inference: the values of these inputs, and the sampler's
    options.

    Raises UsageError for an unknown name, and for text that is not a valid value.
    """
    for name in input_names(config):
        if name not in spec.inputs:
            what = f"has no effect: variant {spec.variant} has no input {name!r}"
            hint = nearest(name, spec.inputs)
            raise UsageError(flag_for(config, name), what + hint)
    values = flag_values(config)
    texts = input_texts(config)
    for name in texts:
        if name in values:
            raise UsageError("--input", f"{name} is also given as --{name}")
    values |= _parse(texts, spec, config)
    return values | flag_values(config, SAMPLING)


def _parse(
    texts: Mapping[str, list[str]], spec: PipelineSpec, config: GenerateConfig
) -> dict[str, Any]:
    """Read inputs as a table of one row would be read, with a column for each."""
    given = ((name, one) for name, one in spec.inputs.items() if name in texts)
    columns = {name: as_column(name, one) for name, one in given}
    if not columns:
        return {}
    row = {name: _cell(texts[name], column) for name, column in columns.items()}
    table = Table(Path("--input"), tuple(row), (row,), (1,))
    # Paths are absolute: any of them is inside the root folder.
    (cells,) = check_rows(table, data_config(config, Path(os.sep)), columns).rows
    return {name: load_cell(cells[name]) for name in columns}


def _cell(texts: list[str], column: Column) -> RawValue:
    """Return the cell of a table that an input's texts make."""
    is_text = column.kind in ("text", "texts")
    if not is_text and not all(text.strip() for text in texts):
        raise UsageError("--input", f"{column.name} is blank")
    if column.is_file:
        texts = [os.path.abspath(text) for text in texts]
    is_list = column.kind in ("images", "texts") or len(texts) > 1
    return texts if is_list else texts[0]


def data_config(config: GenerateConfig, folder: Path) -> DataConfig:
    """Return how the files of inputs are read: at their own size, from a folder."""
    size = Resolution(config.height, config.width, sys.maxsize)
    frames = FrameSampling(config.num_frames or FrameSampling.frames)
    return DataConfig(folder, None, None, size, sampling=frames)


def noticing(config: GenerateConfig, where: str) -> AbstractContextManager[None]:
    """Within, warn of a prompt that is cut, or raise UsageError, as --on_long_prompt says."""

    def notice(found: LongPrompt) -> None:
        if config.on_long_prompt == "error" and not found.usual:
            advice = "shorten it, or give --on_long_prompt truncate"
            raise UsageError(where, str(found), advice)
        logger.warning(f"{where}: {found}")

    return noticing_long_prompts(notice)
