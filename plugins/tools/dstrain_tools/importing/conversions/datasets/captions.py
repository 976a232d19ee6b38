"""Conversions of what captions are made of."""

from typing import Any

from dstrain_tools.importing.context import Context
from dstrain_tools.importing.entries import Result


def with_space_after(option: str, value: Any, context: Context) -> Result:
    """Put a blank between prefix and caption, as sd-scripts does."""
    return Result({option: f"{value} "}) if value else Result(note="is empty")


def with_space_before(option: str, value: Any, context: Context) -> Result:
    """Put a blank between caption and suffix, as sd-scripts does."""
    return Result({option: f" {value}"}) if value else Result(note="is empty")


def kept_tags(option: str, value: Any, context: Context) -> Result:
    """Count the tags that stay, where tags are shuffled."""
    shuffles = context.is_on("shuffle_caption") or context.is_on("shuffle_tokens")
    if not shuffles or not int(value):
        return Result(note="acts where tags are shuffled")
    return Result({option: value})


def caption_of_all(option: str, value: Any, context: Context) -> Result:
    """Give the caption of images without one, unless a table of pairs has it."""
    if not value:
        return Result(note="is empty")
    if any(key.startswith("control") and one.value for key, one in context.own.items()):
        return Result(note="is in the table of pairs, for images without a caption")
    return Result({option: value})
