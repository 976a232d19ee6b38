"""Make classes of options, which scripts give keywords and what converts to a value."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast, dataclass_transform

from dstrain.config.fields import option
from dstrain.config.plugin_options import flags, flags_by_name, plugin_flags
from dstrain.errors import nearest
from dstrain.installed import how_to_have

T = TypeVar("T")
Accepted = TypeVar("Accepted")
Kept = TypeVar("Kept")
NAMED = re.compile(r"--([a-z]\w+)")
"""A flag in a message."""
COMMAND = "dstrain --"
"""How the line of a message begins in which a command is to be typed."""


def converted(
    group: str,
    help: str,
    *,
    converter: Callable[[Accepted], Kept],
    default: Accepted,
    **details: Any,
) -> Kept:
    """Return a dataclass field that is an option, which converts what it is given: not
    as it is set, so what is of a wrong type stays until the configuration is checked.

    Type checkers that know converters let the constructor take what `converter` does;
    mypy does not, and requires the kept type.
    """
    found: Kept = option(group, help, default, converter=converter, **details)
    return found


def required(
    group: str,
    help: str,
    *,
    converter: Callable[[Accepted], Kept],
    common: bool = False,
) -> Kept:
    """Return the field of such an option without a default."""
    metadata = {"group": group, "help": help, "converter": converter, "common": common}
    found: Kept = dataclasses.field(metadata=metadata)
    return found


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(converted, required, dataclasses.field),
)
def options(cls: type[T]) -> type[T]:
    """Make a class of options a frozen dataclass with keyword arguments, of a
    configuration also those of plugins; an error for another name suggests the nearest.
    """
    made = dataclass(frozen=True, kw_only=True)(cls)
    names = {one.name for one in dataclasses.fields(cast(Any, made))}
    set_fields = made.__init__

    @wraps(set_fields)
    def init(self: T, **given: Any) -> None:
        others = given.keys() - names
        known = plugin_flags(cls) if others else {}
        for name in others - known.keys():
            nearby = nearest(name, {*names, *known})
            what = f"{cls.__name__} has no option {name!r}{nearby}"
            if advice := how_to_have("options", name):
                what = f"{cls.__name__}: no option {name!r} is installed; {advice}"
            raise TypeError(what)
        if others:
            values = {**given.get("plugin_options", {})}
            values |= {name: given.pop(name) for name in others}
            given["plugin_options"] = values
        set_fields(self, **given)

    made.__init__ = init  # type: ignore[method-assign, assignment]  # takes plugins' options, too
    return made


def convert(config: Any) -> None:
    """Replace what a script gave for the options of a configuration by what they keep;
    what is of a wrong type stays. Raises UsageError for text that cannot be parsed.
    """
    of_plugins = plugin_flags(type(config)) if config.plugin_options else {}
    values = {}
    for flag in flags(type(config)):
        given = getattr(config, flag.name)
        if given == flag.default:
            continue
        kept = given if flag.converter is None else flag.converter(given)
        if flag.name in of_plugins:
            if kept != flag.default:
                values[flag.name] = kept
        elif flag.converter is not None:
            # The class refuses to set its fields.
            object.__setattr__(config, flag.name, kept)
    object.__setattr__(config, "plugin_options", values)


def as_keywords(message: str, config: type) -> list[str]:
    """Return how a script gives the options of a class that a message names as flags,
    but for those in a whole command.
    """
    known = flags_by_name(config)
    found: dict[str, None] = {}
    for line in message.splitlines():
        for name in NAMED.findall("" if COMMAND in line else line):
            if name in known:
                flag = known[name]
                value = True if flag.kind is bool else flag.bare
                found[f"{name}={'...' if value is None else repr(value)}"] = None
    return list(found)
