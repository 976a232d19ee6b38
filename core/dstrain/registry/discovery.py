"""Find installed plugins by their metadata, and import the record of one family at a
time. Imports no torch.
"""

import importlib.metadata
import os
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dstrain.config import flags_by_name
from dstrain.config.options import GenerateConfig, TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.registry.family import API, ModelFamily

GROUP = "dstrain.models"
HOOK_GROUP = "dstrain"
COMMAND_GROUP = "dstrain.commands"
"""The group whose names are the commands that a distribution adds by its hooks: help lists
them without importing it.
"""


@dataclass(frozen=True, order=True)
class Installed:
    """A plugin, as the metadata of its distribution describes it."""

    name: str
    distribution: str
    version: str
    entry_point: str
    group: str = GROUP

    @property
    def where(self) -> str:
        """Return the name of the plugin in errors."""
        return f"plugin {self.distribution} {self.version}"

    def load(self) -> Any:
        """Import what the entry point names; raise UsageError if that fails."""
        entry = importlib.metadata.EntryPoint(self.name, self.entry_point, self.group)
        try:
            # Standard output is for the answers of commands.
            with redirect_stdout(sys.stderr):
                return entry.load()
        except (Exception, SystemExit) as error:
            reason = f"{self.entry_point} cannot be imported: {type(error).__name__}: {error}"
            advice = f"disable it with -p no:{self.name}"
            raise UsageError(self.where, reason, advice) from error


def installed(
    disabled_plugins: Collection[str] = (), group: str = GROUP
) -> tuple[Installed, ...]:
    """Return the plugins of a group, sorted by name, without importing any.

    disabled_plugins: Names of plugins, or of distributions, to leave out.
    """
    places = tuple((place, _changed_at(place)) for place in sys.path)
    return tuple(
        plugin
        for plugin in _found_in(places, group)
        if not {plugin.name, plugin.distribution} & set(disabled_plugins)
    )


# A run asks several times, and each answer takes the metadata of every distribution. One
# that is installed meanwhile changes the folder that it lies in.
@lru_cache(maxsize=8)
def _found_in(places: tuple[tuple[str, int], ...], group: str) -> tuple[Installed, ...]:
    found = []
    for entry in importlib.metadata.entry_points(group=group):
        dist = entry.dist
        if dist is None:
            continue
        plugin = Installed(entry.name, dist.name, dist.version, entry.value, group)
        found.append(plugin)
    return tuple(sorted(found))


def _changed_at(place: str) -> int:
    """Return when a folder of sys.path changed, in nanoseconds; 0 if it is not there."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def refuse_unknown(name: str) -> None:
    """Raise UsageError if a name is neither that of a plugin nor of a distribution."""
    known: set[str] = set()
    for plugin in (*installed(), *installed(group=HOOK_GROUP)):
        known |= {plugin.name, plugin.distribution}
    if name not in known:
        raise UsageError("-p", _no_such("plugin", name, sorted(known)))


def load_family(name: str, disabled_plugins: Collection[str] = ()) -> ModelFamily:
    """Import the record of a family, and of no other.

    Raises UsageError if no distribution provides the family, or several do, or if what
    it provides is not a usable record.
    """
    plugins = installed(disabled_plugins)
    for plugin in plugins:
        if plugin.name == name:
            refuse_clash(plugin, plugins)
            return checked_family(plugin)
    names = list(dict.fromkeys(plugin.name for plugin in plugins))
    raise UsageError("--model", _no_such("model", name, names))


def usable_families(
    disabled_plugins: Collection[str] = (),
    names: Collection[str] | None = None,
) -> tuple[list[ModelFamily], list[str]]:
    """Import the record of every family; return also why others cannot be used.

    Args:
        disabled_plugins: Names of plugins, or of distributions, to leave out.
        names: The families to import; None for all.
    """
    families, broken = [], []
    for name in dict.fromkeys(plugin.name for plugin in installed(disabled_plugins)):
        if names is not None and name not in names:
            continue
        try:
            family = load_family(name, disabled_plugins)
            reason = next(family.missing_targets(), "")
        except UsageError as error:
            reason = error.what
        if reason:
            broken.append(f"{name} is left out, since it is broken: {reason}")
        else:
            families.append(family)
    return families, broken


def _no_such(
    kind: str,
    name: str,
    known: Collection[str],
) -> str:
    names = ", ".join(known) or "none"
    return f"no {kind} named {name!r}; installed: {names}{nearest(name, known)}"


def variant_of(family: ModelFamily, name: str | None) -> str:
    """Return the variant of this name, or the family's first one for None.

    Raises UsageError for a variant that the family does not have.
    """
    if name is None:
        return family.variants[0]
    if name not in family.variants:
        hint = nearest(name, family.variants)
        known = ", ".join(family.variants)
        what = f"{family.name} has no variant {name!r}; variants: {known}{hint}"
        raise UsageError("--variant", what)
    return name


def refuse_clash(plugin: Installed, plugins: Collection[Installed]) -> None:
    """Raise UsageError if another plugin has the same name."""
    same = [other for other in plugins if other.name == plugin.name]
    if len(same) > 1:
        names = " and by ".join(f"{one.distribution} {one.version}" for one in same)
        raise UsageError(
            plugin.where,
            f"{plugin.name!r} is provided by {names}",
            f"disable one with -p no:{plugin.distribution}, or uninstall it",
        )


def checked_family(plugin: Installed) -> ModelFamily:
    """Import the record of a family; raise UsageError if it cannot be used."""
    family = plugin.load()
    if not isinstance(family, ModelFamily):
        what = f"{plugin.entry_point} is a {type(family).__name__}, not a dstrain.plugin.ModelFamily"
        raise UsageError(plugin.where, what)
    if family.api != API:
        raise UsageError(
            plugin.where,
            f"its record was made for plugin interface {family.api}, this dstrain has {API}",
            "install compatible versions of the plugin and of dstrain",
        )
    if family.name != plugin.name:
        what = (
            f"its entry point is named {plugin.name!r}, but its record {family.name!r}"
        )
        raise UsageError(plugin.where, what)
    for problem in family.problems():
        raise UsageError(plugin.where, problem)
    taken = {"config", "debug", "format", "help", "p", "recipe", "versions"}
    taken |= flags_by_name(TrainConfig).keys() | flags_by_name(GenerateConfig).keys()
    for option in family.options:
        if option.name in taken:
            what = f"its flag --{option.name} is already one of dstrain's own"
            raise UsageError(plugin.where, what)
    return family
