"""Put the options of a configuration class together with those that plugins add."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, get_args

from dstrain.config.fields import Effect, Flag, Group, own_flags
from dstrain.config.plugin_records import Record, read_records, records
from dstrain.installed import OPTIONS_GROUP, Installed, installed


def flags(config: type) -> tuple[Flag, ...]:
    """Return the options of a configuration class in the order of its fields, and then those
    of plugins.
    """
    command = getattr(config, "command", "")
    return _all_flags(config, records()) if command else own_flags(config)


@lru_cache(maxsize=16)
def _all_flags(config: Any, known: tuple[Record, ...]) -> tuple[Flag, ...]:
    found = list(own_flags(config))
    for record in known:
        if _clash(config, record):
            continue
        for name, added in record.choices.items():
            found = [
                replace(flag, choices=(*flag.choices, *added))
                if flag.name == name
                else flag
                for flag in found
            ]
        found += [flag for flag in record.flags if config.command in flag.commands]
    return tuple(found)


def _clash(config: Any, record: Record) -> str:
    """Return which option of a plugin is already one of a command's own; '' for none."""
    own = {flag.name for flag in own_flags(config)}
    for flag in record.flags:
        if config.command in flag.commands and flag.name in own:
            what = f"its option --{flag.name} is already one of dstrain's own"
            return f"{record.plugin.where}: {what}"
    return ""


def flags_by_name(config: type) -> dict[str, Flag]:
    """Return the options of a configuration class by name, in the order of `flags`."""
    return {flag.name: flag for flag in flags(config)}


def headings(used: Iterable[str]) -> list[str]:
    """Return the headings of help in their order: those of `Group`, and behind its kind each
    of the used ones that is a plugin's own.
    """
    found: list[str] = list(get_args(Group))
    for group in used:
        if group not in found:
            kind = group.partition(":")[0]
            alike = [at for at, one in enumerate(found) if one.startswith(kind)]
            found.insert(alike[-1] + 1 if alike else -1, group)
    return found


def changed(config: Any, effect: Effect) -> list[Flag]:
    """Return the options with this effect that are typed, or not at their default."""
    return [
        flag
        for flag in flags(type(config))
        if effect in flag.affects
        and (flag.name in config.typed or getattr(config, flag.name) != flag.default)
    ]


def changed_of_plugins(config: Any) -> list[tuple[str, Installed]]:
    """Return the options of plugins that are not at their default, each with its plugin."""
    return [
        (flag.name, record.plugin)
        for record in records(config.disabled_plugins)
        for flag in record.flags
        if config.plugin_options.get(flag.name, flag.default) != flag.default
    ]


def plugin_flags(config: type) -> dict[str, Flag]:
    """Return the options that plugins add to a configuration class, by name."""
    own = {flag.name for flag in own_flags(config)}
    return {flag.name: flag for flag in flags(config) if flag.name not in own}


def generator_of(config: Any) -> str:
    """Return "package.module:function" of what generates in the place of dstrain, where a
    plugin's options ask for that; '' for none.
    """
    for record in records(config.disabled_plugins):
        takes = getattr(config.of(record.options), "takes_generate", None)
        if takes is not None and (place := takes()):
            return str(place)
    return ""


def broken_records(config: type) -> tuple[str, ...]:
    """Return why options of further plugins cannot be used with a configuration class."""
    clashes = [_clash(config, record) for record in records()]
    return (
        *read_records(installed(group=OPTIONS_GROUP), tuple(sys.path))[1],
        *filter(None, clashes),
    )


TYPES = MappingProxyType({bool: "boolean", int: "integer", float: "number"})
"""Type of an option -> that of JSON Schema; any other is a string."""


def schema(config: type) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of a file of options, those of plugins
    included.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {flag.name: _schema_of(flag) for flag in flags(config)},
    }


def _schema_of(flag: Flag) -> dict[str, Any]:
    kinds = [TYPES.get(flag.kind, "string")]
    # A number may be text that says several, or one for each of several names.
    kinds += ["string"] * (flag.by_name or flag.listed)
    # In a file, null leaves an option out.
    none = [None] * (flag.default is None)
    kinds += ["null"] * len(none)
    found: dict[str, Any] = {"type": kinds if len(kinds) > 1 else kinds[0]}
    if flag.is_open:
        found["anyOf"] = [{"enum": list(flag.choices)}, {"pattern": r"\."}]
    elif flag.choices:
        found["enum"] = [*flag.choices, *none]
    for name, bound in (
        ("minimum", flag.minimum),
        ("maximum", flag.maximum),
        ("exclusiveMinimum", flag.above),
        ("exclusiveMaximum", flag.below),
    ):
        if bound is not None:
            found[name] = bound
    if flag.many:
        found = {"type": "array", "items": found}
    if flag.default not in (None, ()) and not flag.required:
        found["default"] = flag.default
    return {"description": flag.help, **found, "group": flag.group}
