"""The command, formats and types that this package adds to `dstrain`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click
from dstrain.plugin import hookimpl

if TYPE_CHECKING:
    from dstrain.plugin.lora import LoraFormat, LoraType

api = 2


@hookimpl
def dstrain_commands() -> Sequence[click.Command]:
    """Return `dstrain export`."""
    from dstrain_formats.command import export_command

    return [export_command()]


@hookimpl
def dstrain_lora_formats() -> Sequence[LoraFormat]:
    """Return the formats of ComfyUI, kohya's scripts and DiffSynth-Studio."""
    from dstrain_formats.programs import PROGRAMS

    return PROGRAMS


@hookimpl
def dstrain_lora_types() -> Sequence[LoraType]:
    """Return DoRA, LoKr, LoHa and OFT."""
    from dstrain_formats.lora_types import TYPES

    return [import_module(f"dstrain_formats.lora_types.{name}").TYPE for name in TYPES]
