"""Conversions of what captions are made of."""

from typing import Any

from dstrain.data import CAPTIONS

from dstrain_tools.importing.context import Context, as_list, as_whole_number
from dstrain_tools.importing.entries import Result


def with_space_after(option: str, value: Any, context: Context) -> Result:
    """Put a blank between prefix and caption, as sd-scripts does."""
    return Result({option: f"{value} "}) if value else Result(note="is empty")


def with_space_before(option: str, value: Any, context: Context) -> Result:
    """Put a blank between caption and suffix, as sd-scripts does."""
    return Result({option: f" {value}"}) if value else Result(note="is empty")


def caption_files(option: str, value: Any, context: Context) -> Result:
    """Say whether the files with captions are found, by their ending."""
    others = []
    for ending in as_list(value or CAPTIONS[0]):
        suffix = f".{str(ending).lstrip('.')}"
        if suffix.lower() not in CAPTIONS:
            others.append(suffix)
    if others:
        names = ", ".join(others)
        return Result(
            lost=f"captions in {names} files are not found: rename them to .txt"
        )
    return Result(note="captions in .txt, .caption and .json files are found")


def kept_tags(option: str, value: Any, context: Context) -> Result:
    """Count the tags that stay, where tags are shuffled."""
    shuffles = context.is_on("shuffle_caption") or context.is_on("shuffle_tokens")
    if not shuffles or not as_whole_number(value):
        return Result(note="has an effect only if tags are shuffled")
    return Result({option: value})


def caption_of_all(option: str, value: Any, context: Context) -> Result:
    """Give the caption of images without one, unless a table of pairs has it."""
    if not value:
        return Result(note="is empty")
    if any(key.startswith("control") and one.value for key, one in context.own.items()):
        return Result(note="is in the table of pairs, for images without a caption")
    return Result({option: value})
