"""What a plugin may add beside a family: the hooks of entry-point group `dstrain`, and
who answers them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from dstrain.errors import DstrainError
from dstrain.registry.discovery import HOOK_GROUP, Installed, installed, name_clash

if TYPE_CHECKING:
    import click

    from dstrain.graph.task import Task


hookspec = pluggy.HookspecMarker(HOOK_GROUP)
hookimpl = pluggy.HookimplMarker(HOOK_GROUP)


class Hooks:
    """The hooks; a plugin implements any of them with `@hookimpl`."""

    @hookspec
    def dstrain_commands(self) -> Sequence[click.Command]:
        """Return extra commands of the command line."""
        raise NotImplementedError

    @hookspec
    def dstrain_tasks(self) -> Sequence[Task]:
        """Return extra tasks for `--task`."""
        raise NotImplementedError

    @hookspec
    def dstrain_step_end(self, step: int, numbers: Mapping[str, float]) -> None:
        """Look on after optimizer step `step`, with the numbers that are logged."""


@dataclass(frozen=True)
class Extensions:
    """Who answers the hooks, by name; `broken` says who does not, and why."""

    manager: pluggy.PluginManager
    plugins: Mapping[str, Installed]
    broken: tuple[str, ...] = ()

    def offered(self, hook: str, kind: type, names_of_ours: Collection[str]) -> Offers:
        """Ask every plugin by a hook for things that have a name; one whose answer
        cannot be used harms no other.

        Left out, with the reason, are those of a plugin that raises, that are no
        `kind`, or whose name is one of ours or that of another plugin's.
        """
        found: dict[str, tuple[Installed, Any]] = {}
        twice: set[str] = set()
        reasons = []
        for plugin in self.plugins.values():
            answered, reason = self._answer(plugin, hook, kind)
            reasons += [reason] if reason else []
            for item in answered:
                word = f"its {kind.__name__.lower()} {item.name!r}"
                if item.name in names_of_ours:
                    reasons.append(
                        f"{plugin.where}: {word} has the name of one of dstrain's own, and is left out"
                    )
                elif item.name in found:
                    other = found[item.name][0].where
                    reasons.append(
                        f"{plugin.where}: {word} is offered by {other} too; both are left out"
                    )
                    twice.add(item.name)
                else:
                    found[item.name] = (plugin, item)
        items = {name: item for name, (_, item) in found.items() if name not in twice}
        return Offers(MappingProxyType(items), tuple(reasons))

    def step_end(self, step: int, numbers: Mapping[str, float]) -> tuple[str, ...]:
        """Show a step's numbers to those who look on; one that raises is left out from
        then on. Returns the reasons.
        """
        reasons = []
        for name, plugin in self.plugins.items():
            try:
                self._only(name, "dstrain_step_end")(step=step, numbers=numbers)
            except (Exception, SystemExit) as error:
                self.manager.unregister(name=name)
                reasons.append(
                    f"{plugin.where} disabled: its dstrain_step_end hook raised {_said(error)}"
                )
        return tuple(reasons)

    def _answer(
        self, plugin: Installed, hook: str, kind: type
    ) -> tuple[tuple[Any, ...], str]:
        """Return what one plugin offers, or why that cannot be used."""
        try:
            items = tuple(
                item for answer in self._only(plugin.name, hook)() for item in answer
            )
        except (Exception, SystemExit) as error:
            return (), f"{plugin.where}: {hook} failed: {_said(error)}"
        wrong = next((item for item in items if not isinstance(item, kind)), None)
        if wrong is not None:
            return (
                (),
                f"{plugin.where}: {hook} returned a {type(wrong).__name__}, not a {kind.__name__}",
            )
        return items, ""

    def _only(self, name: str, hook: str) -> pluggy.HookCaller:
        """Return the hook as this plugin alone answers it."""
        others = [
            plugin for other, plugin in self.manager.list_name_plugin() if other != name
        ]
        return self.manager.subset_hook_caller(hook, others)


@dataclass(frozen=True)
class Offers:
    """What plugins offer by one hook, by name; `broken` says what of it cannot be used,
    and why.
    """

    items: Mapping[str, Any]
    broken: tuple[str, ...] = ()


def load_extensions(left_out: Collection[str] = ()) -> Extensions:
    """Import and register every plugin of the group that is installed, when a run
    starts.
    """
    return registered(installed(left_out, HOOK_GROUP))


def registered(plugins: Collection[Installed]) -> Extensions:
    """Import and register these plugins of the group; one that is broken is told of and
    left out.
    """
    manager = pluggy.PluginManager(HOOK_GROUP)
    manager.add_hookspecs(Hooks)
    reasons = {
        plugin: _register(manager, plugin, name_clash(plugin, plugins))
        for plugin in plugins
    }
    good = {plugin.name: plugin for plugin, reason in reasons.items() if not reason}
    return Extensions(
        manager,
        MappingProxyType(good),
        tuple(reason for reason in reasons.values() if reason),
    )


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def _register(manager: pluggy.PluginManager, plugin: Installed, clash: str) -> str:
    """Register one plugin; return why it could not be, or ''."""
    if clash:
        return f"{plugin.where}: {clash}"
    try:
        manager.register(plugin.load(), name=plugin.name)
        manager.check_pending()
    except DstrainError as error:
        return f"{error.where}: {error.what}"
    except Exception as error:
        if manager.has_plugin(plugin.name):
            manager.unregister(name=plugin.name)
        return f"{plugin.where}: {_said(error)}"
    return ""
