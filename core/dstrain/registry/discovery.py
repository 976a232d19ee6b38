"""Finding families: installed plugins by their metadata, and their records, one at a
time. Imports no torch.
"""

import importlib.metadata
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from dstrain.config.fields import flags
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.registry.family import API, ModelFamily

GROUP = "dstrain.models"
HOOK_GROUP = "dstrain"


@dataclass(frozen=True)
class Installed:
    """A plugin as its distribution's metadata tell of it: nothing of it is imported."""

    name: str
    distribution: str
    version: str
    entry_point: str
    group: str = GROUP

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"plugin {self.distribution} {self.version}"

    def load(self) -> Any:
        """Import what the entry point names; raises UsageError with the distribution,
        its version and the reason.
        """
        try:
            with redirect_stdout(
                sys.stderr
            ):  # standard output is for what a command answers
                return importlib.metadata.EntryPoint(
                    self.name, self.entry_point, self.group
                ).load()
        except (Exception, SystemExit) as error:
            reason = f"{self.entry_point} cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(
                self.where, reason, f"leave it out with -p no:{self.name}"
            ) from error


def installed(
    left_out: Collection[str] = (), group: str = GROUP
) -> tuple[Installed, ...]:
    """Every plugin of a group by name, less those whose name or distribution is in
    `left_out`; reads metadata only.
    """
    found = []
    for entry in importlib.metadata.entry_points(group=group):
        if entry.dist is not None:
            found.append(
                Installed(
                    entry.name, entry.dist.name, entry.dist.version, entry.value, group
                )
            )
    kept = (
        plugin
        for plugin in found
        if plugin.name not in left_out and plugin.distribution not in left_out
    )
    return tuple(sorted(kept, key=lambda plugin: (plugin.name, plugin.distribution)))


def refuse_unknown(left_out: Collection[str]) -> None:
    """Raise UsageError when a name of `-p no:NAME` is neither a plugin nor the
    distribution of one.
    """
    plugins = (*installed(), *installed(group=HOOK_GROUP))
    known = sorted(
        {name for plugin in plugins for name in (plugin.name, plugin.distribution)}
    )
    for name in left_out:
        if name not in known:
            raise UsageError(
                "-p",
                f"no plugin named {name!r}; installed: {', '.join(known) or 'none'}{nearest(name, known)}",
            )


def load_family(name: str, left_out: Collection[str] = ()) -> ModelFamily:
    """Import the record of the family named; no other plugin is imported.

    Raises UsageError when none or several distributions offer it, or when what it
    imports is no record that fits.
    """
    plugins = installed(left_out)
    same = [plugin for plugin in plugins if plugin.name == name]
    if not same:
        names = list(dict.fromkeys(plugin.name for plugin in plugins))
        raise UsageError(
            "--model",
            f"no model named {name!r}; installed: {', '.join(names) or 'none'}{nearest(name, names)}",
        )
    clash = name_clash(same[0], plugins)
    if clash:
        raise UsageError(
            "--model",
            clash,
            f"leave one out with -p no:{same[0].distribution}, or uninstall it",
        )
    return checked_family(same[0])


def variant_of(family: ModelFamily, name: str | None) -> str:
    """Return the variant named, or the family's first; raise UsageError for one it does
    not have.
    """
    if name is None:
        return family.variants[0]
    if name not in family.variants:
        known = ", ".join(family.variants)
        raise UsageError(
            "--variant",
            f"{family.name} has no variant {name!r}; variants: {known}{nearest(name, family.variants)}",
        )
    return name


def name_clash(plugin: Installed, plugins: Collection[Installed]) -> str:
    """Why a plugin is refused when another one has its name, naming the distributions;
    '' when none has.
    """
    same = [
        f"{other.distribution} {other.version}"
        for other in plugins
        if other.name == plugin.name
    ]
    return (
        f"{plugin.name!r} is offered by {' and by '.join(same)}"
        if len(same) > 1
        else ""
    )


def checked_family(plugin: Installed) -> ModelFamily:
    """Import a plugin's record; raises UsageError naming the distribution when it is
    none that fits.
    """
    family = plugin.load()
    if not isinstance(family, ModelFamily):
        raise UsageError(
            plugin.where,
            f"{plugin.entry_point} is a {type(family).__name__}, not a dstrain.registry.family.ModelFamily",
        )
    if family.api != API:
        raise UsageError(
            plugin.where,
            f"its record is made for plugin interface {family.api}, this dstrain has {API}",
            "install versions of the plugin and of dstrain that fit together",
        )
    if family.name != plugin.name:
        raise UsageError(
            plugin.where,
            f"its entry point is named {plugin.name!r}, its record {family.name!r}",
        )
    for problem in family.problems():
        raise UsageError(plugin.where, problem)
    if not family.variants:
        raise UsageError(plugin.where, f"the record of {plugin.name!r} has no variant")
    for option in family.options:
        if option.name in taken_names():
            raise UsageError(
                plugin.where,
                f"its flag --{option.name} is already one of dstrain's own",
            )
    return family


def taken_names() -> frozenset[str]:
    """Names that no family's flag can have: those of dstrain's own, and of what a
    written configuration holds.
    """
    own = (
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    )
    return frozenset((*own, "config", "debug", "format", "help", "p", "versions"))
