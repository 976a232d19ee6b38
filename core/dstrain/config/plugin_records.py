"""Read the records of options that plugins add (entry-point group `dstrain.options`). Imports
no torch, and nothing of a plugin but these records.
"""

import dataclasses
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from dstrain.config.fields import Effect, Flag, check_value, own_flags
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
KINDS = (bool, int, float, str, Path)
"""The types of options of plugins."""


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


def records(disabled_plugins: Collection[str] = ()) -> tuple[Record, ...]:
    """Return the records of options of plugins, by name, without disabled plugins or
    distributions.
    """
    found, _ = read_records(installed(group=OPTIONS_GROUP), tuple(sys.path))
    disabled = set(disabled_plugins)
    return tuple(
        one
        for one in found
        if disabled.isdisjoint((one.plugin.name, one.plugin.distribution))
    )


@lru_cache(maxsize=4)
def read_records(
    plugins: tuple[Installed, ...], places: tuple[str, ...]
) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """Return the usable records of plugins, found in these places, and why others are not."""
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
    if not re.fullmatch("[a-z][a-z0-9_]*", flag.name):
        raise UsageError(where, "has a name that is not in lower case")
    if flag.kind not in KINDS:
        raise UsageError(where, f"is of type {flag.kind}, which no option has")
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
