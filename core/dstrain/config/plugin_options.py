"""Read the records of options that plugins add to `train` and `generate` (entry-point
group `dstrain.options`). Imports no torch, and nothing of a plugin but these records.
"""

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from dstrain.config.fields import Effect, Flag, Group, check_value, own_flags
from dstrain.errors import DstrainError, UsageError
from dstrain.installed import (
    OPTIONS_GROUP,
    Installed,
    described,
    installed,
    refuse_clash,
)

Command = Literal["train", "generate"]
HEAVY = ("torch", "diffusers", "transformers", "pyarrow", "av")
"""What takes long to import; a record of options, which help imports, does without."""


@dataclass(frozen=True, eq=False)
class Record:
    """A plugin's class of options.

    It is made by `@options`, and its fields by `option` or `converted`; each says by
    `commands` which commands have it. It may define

    - `check(self, config)`: raises UsageError for values that contradict each other, or
      the rest of a configuration;
    - `choices`: option of dstrain's own -> further choices, where other hooks of the
      plugin say what they mean;
    - `writes`: patterns of the files that the plugin lists in a run's folder;
    - `of_run(self, recorded) -> dict`: values for `dstrain generate --run`, of those that the
      run recorded, where these options do not say otherwise;
    - `takes_generate(self) -> str`: "package.module:function" of what `dstrain generate`
      calls with the configuration in place of generating, or ''.
    """

    plugin: Installed
    options: type[Any]
    flags: tuple[Flag, ...]

    @property
    def writes(self) -> tuple[str, ...]:
        """Return patterns of the files that the plugin writes to a run's folder."""
        patterns: tuple[str, ...] = getattr(self.options, "writes", ())
        return patterns

    @property
    def choices(self) -> Mapping[str, tuple[str, ...]]:
        """Return the choices that it adds, by option."""
        added: Mapping[str, tuple[str, ...]] = getattr(self.options, "choices", {})
        return added


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
    """Return the options with this effect that are not at their default."""
    return [
        flag
        for flag in flags(type(config))
        if effect in flag.affects and getattr(config, flag.name) != flag.default
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


def records(disabled_plugins: Collection[str] = ()) -> tuple[Record, ...]:
    """Return the records of options of plugins, by name of the plugin.

    disabled_plugins: Names of plugins, or of distributions, to leave out.
    """
    found, _ = _read(installed(group=OPTIONS_GROUP), tuple(sys.path))
    disabled = set(disabled_plugins)
    return tuple(
        one
        for one in found
        if disabled.isdisjoint((one.plugin.name, one.plugin.distribution))
    )


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
        *_read(installed(group=OPTIONS_GROUP), tuple(sys.path))[1],
        *filter(None, clashes),
    )


@lru_cache(maxsize=4)
def _read(
    plugins: tuple[Installed, ...], places: tuple[str, ...]
) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    # The same plugin may be found in another of the places.
    owners: dict[str, str] = {}
    found, broken = [], []
    for plugin in plugins:
        try:
            refuse_clash(plugin, plugins)
            record = _record(plugin)
            for flag in record.flags:
                if flag.name in owners:
                    what = f"its option --{flag.name} is one of {owners[flag.name]}"
                    raise UsageError(plugin.where, what)
        except DstrainError as error:
            broken.append(f"{error.where}: {error.what}")
            continue
        owners |= dict.fromkeys((flag.name for flag in record.flags), plugin.where)
        found.append(record)
    return tuple(found), tuple(broken)


def _record(plugin: Installed) -> Record:
    """Import a record; raise UsageError if it is not usable."""
    before = {name for name in HEAVY if name in sys.modules}
    options = plugin.load()
    for name in HEAVY:
        if name in sys.modules and name not in before:
            what = f"its options, {plugin.entry_point}, import {name}, which help cannot wait for"
            raise UsageError(plugin.where, what)
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        what = f"{plugin.entry_point} is no class of options"
        raise UsageError(plugin.where, what)
    try:
        flags = own_flags(options)
        for flag in flags:
            _check(flag)
    except UsageError as error:
        what = f"its option {error.where} is not usable: {error.what}"
        raise UsageError(plugin.where, what) from error
    except Exception as error:
        what = f"its options, {plugin.entry_point}, cannot be read: {described(error)}"
        raise UsageError(plugin.where, what) from error
    return Record(plugin, options, flags)


def _check(flag: Flag) -> None:
    """Raise UsageError for an option that no command line can have."""
    where = f"--{flag.name}"
    if flag.required:
        raise UsageError(where, "has no default")
    unknown = sorted({*flag.affects} - {*get_args(Effect)})
    if unknown:
        raise UsageError(where, f"affects {unknown[0]!r}, which is no effect")
    wrong = sorted({*flag.commands} - {*get_args(Command)})
    if wrong or not flag.commands:
        raise UsageError(where, f"is for commands {flag.commands}, not {Command}")
    try:
        check_value(flag, flag.default)
    except UsageError as error:
        raise UsageError(where, f"its default: {error.what}") from error


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
    kind: Any = TYPES.get(flag.kind, "string")
    # A number may be text that says several, or one for each of several names.
    found: dict[str, Any] = {
        "type": [kind, "string"] if flag.by_name or flag.listed else kind
    }
    if flag.is_open:
        found["anyOf"] = [{"enum": list(flag.choices)}, {"pattern": r"\."}]
    elif flag.choices:
        found["enum"] = list(flag.choices)
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
