"""Conversions that do not look at what a value is of."""

from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import Context, as_list, truth
from dstrain_tools.importing.entries import Result


def as_it_is(option: str, value: Any, context: Context) -> Result:
    """Carry a value over."""
    if value is None or value == "":
        return Result(note="is empty")
    if str(value).lower() == "false":
        return Result(note="is off, as here without the flag")
    return Result({option: value})


def switch(option: str, value: Any, context: Context) -> Result:
    """Switch on or off what some families have on by default, and others off."""
    return Result({option: truth(value)})


def same_name(option: str, value: Any, context: Context) -> Result:
    """Carry a flag over that is the same here."""
    if isinstance(value, list):
        return Result({option: value})
    return as_it_is(option, value, context)


def other_file(option: str, value: Any, context: Context) -> Result:
    """Name a file, such as a LoRA, that the run starts from."""
    if not value:
        return Result(note="is empty")
    if not Path(str(value)).is_file():
        return Result(lost=f"{value} is not here; give it with --{option}")
    return Result({option: value})


def training_adapter(option: str, value: Any, context: Context) -> Result:
    """Name a LoRA that is merged while training, its alpha the rank unless it states one."""
    lora = other_file(option, value, context)
    if lora.lost:
        return Result(lost=f"{lora.lost}, with @alpha=rank@training_only at its end")
    value = f"{value}@alpha=rank@training_only"
    return Result({option: value}) if lora.options else lora


def base_weights(option: str, value: Any, context: Context) -> Result:
    """Name a LoRA that is merged before training; one for distilled models is named as
    that, and left out of previews.
    """
    files = as_list(value)
    if len(files) > 1:
        return Result(lost=f"one file is merged: --{option} FILE")
    if "adapter" in Path(str(files[0])).name:
        return training_adapter(option, files[0], context)
    return other_file(option, files[0], context)
