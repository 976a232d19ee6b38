"""Inputs of inference as a command line gives them: names and text, turned into the
values units read.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.config.schema import GenerateConfig
from dstrain.data.cells import load_cell
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import DataConfig, check_rows
from dstrain.data.images import Resolution
from dstrain.data.metadata import Table
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import FILE_KINDS, Input, _kind, as_column
from dstrain.graph.spec import PipelineSpec

NAMED = ("prompt", "negative_prompt", "height", "width", "num_frames")
"""Inputs that have a flag of their own."""


def flag_for(config: GenerateConfig, name: str) -> str:
    """How a command line gives an input: by its own flag, or by --input."""
    return (
        f"--{name}"
        if name in NAMED and getattr(config, name) is not None
        else f"--input {name}"
    )


def input_names(config: GenerateConfig) -> tuple[str, ...]:
    """The names of the inputs that a command line gives."""
    named = [name for name in NAMED if getattr(config, name) is not None]
    return tuple(dict.fromkeys([*named, *(item.name for item in config.input)]))


def parse_inputs(config: GenerateConfig, spec: PipelineSpec) -> dict[str, Any]:
    """The values of these inputs; raises UsageError for an unknown name, or for text
    that is no such value.
    """
    values = {
        name: getattr(config, name)
        for name in NAMED
        if getattr(config, name) is not None
    }
    for name in values:
        if name not in spec.inputs:
            raise UsageError(
                f"--{name}",
                f"has no effect: variant {spec.variant} has no such input",
            )
    texts: dict[str, list[str]] = {}
    for item in config.input:
        texts.setdefault(item.name, []).append(item.text)
    for name, written in texts.items():
        if name in values:
            raise UsageError("--input", f"{name} is also given as --{name}")
        if name not in spec.inputs:
            raise UsageError(
                "--input",
                f"{spec.variant} has no input {name!r}{nearest(name, spec.inputs)}",
            )
        values[name] = _value(name, written, spec.inputs[name], config)
    return values


def _value(
    name: str, written: Sequence[str], source: Input, config: GenerateConfig
) -> Any:
    kind = _kind(source)
    many = kind in ("images", "texts")
    if len(written) > 1 and not many:
        raise UsageError(
            "--input", f"{name} is one value, and is given {len(written)} times"
        )
    if kind not in ("text", "texts") and not all(map(str.strip, written)):
        raise UsageError("--input", f"{name} is blank")
    texts = (
        [os.path.abspath(text) for text in written]
        if kind in FILE_KINDS
        else list(written)
    )
    own = as_column(name, source)
    table = Table(
        Path("--input"), (name,), ({name: texts if many else texts[0]},), (1,)
    )
    size = Resolution(config.height, config.width, sys.maxsize)
    clip = (
        FrameSampling()
        if config.num_frames is None
        else FrameSampling(config.num_frames)
    )
    dataset = check_rows(
        table, DataConfig(Path(os.sep), None, None, size, sampling=clip), {name: own}
    )
    return load_cell(dataset.rows[0][name])
