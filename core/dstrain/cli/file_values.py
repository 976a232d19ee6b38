"""Fit the options of a file to a command: unknown names, toys, and a model that is typed."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import click

from dstrain.cli.errors import no_such
from dstrain.config import flags
from dstrain.config.options import TrainConfig
from dstrain.config.serialize import MODEL_FILES
from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.installed import is_default_of_absent
from dstrain.registry import ModelFamily

logger = get_logger(__name__)


def default_map(
    path: object, values: Mapping[str, Any], options: Mapping[str, click.Option]
) -> dict[str, Any]:
    """Return what a file gives by the names of parameters; click converts it.

    options: by the names that a file has for them. Raises UsageError for an unknown
    name, and for a list where one value is wanted, or the other way round.
    """
    defaults = {}
    for key, value in values.items():
        where = f"{path}:{key}"
        if key not in options and is_default_of_absent(key, value):
            continue
        if key not in options:
            ctx = click.get_current_context(silent=True)
            raise UsageError(where, *no_such(key, options, ctx))
        option = options[key]
        if option.multiple and not isinstance(value, list):
            raise UsageError(where, "can be repeated: expected a list")
        if isinstance(value, list) and not option.multiple:
            what = "expected one value; write it in quotes, as on the command line"
            raise UsageError(where, what)
        defaults[str(option.name)] = value
    return defaults


def is_true(text: str) -> bool:
    """Return whether a file switches an option on, in any word that click takes for it."""
    with suppress(click.BadParameter):  # refused later, with its place
        return click.BOOL.convert(text, None, None)
    return False


def for_toy(values: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Return options of a file or recipe as a toy has them: it builds its own model
    files, and is too small for some values.
    """
    parts = [one.name for one in family.options if one.component and not one.field]
    left = {
        name: value
        for name, value in values.items()
        if name not in (*MODEL_FILES, "hub", *parts)
    }
    for flag in flags(TrainConfig):
        text = str(left.get(flag.name, ""))
        if flag.most_of_toy and text.isdecimal():
            left[flag.name] = str(min(int(text), flag.most_of_toy))
    return left


def with_choice_of_model(
    typed: Mapping[str, Any], values: dict[str, Any], family: ModelFamily, path: object
) -> dict[str, Any]:
    """Return the options of a file as they are under the model that is typed: --toy
    replaces the file's model, and a model its `toy`. Says what is replaced.
    """
    files = [name for name in MODEL_FILES if typed.get(name)]
    if files and not typed["toy"] and is_true(values.get("toy", "")):
        logger.info(f"--{files[0]} replaces toy of {path}")
        return {name: value for name, value in values.items() if name != "toy"}
    if not typed["toy"]:
        return values
    found = for_toy(values, family)
    if gone := [name for name in values if found.get(name) != values[name]]:
        logger.info(f"--toy replaces {', '.join(gone)} of {path}: its model is tiny")
    # The model may be published for one variant alone, which the toy is then of.
    model_id = str(values.get("model_id", "")).partition("@")[0]
    variants = family.variants_of(model_id)
    if len(variants) == 1:
        found.setdefault("variant", variants[0])
    return found
