"""What a plugin may add beside a family: the hooks of entry-point group `dstrain`, and who answers them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

from dstrain.errors import DstrainError
from dstrain.plugins import HOOK_GROUP, Installed, installed, name_clash

if TYPE_CHECKING:
    import click

    from dstrain.tasks import Task

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
    """Who answers the hooks: `hook.dstrain_tasks()` asks them all; `broken` says who does not answer, and why."""

    hook: pluggy.HookRelay
    broken: tuple[str, ...] = ()


def load_extensions(left_out: Collection[str] = ()) -> Extensions:
    """Import and register every plugin of the group, when a run starts; one that is broken is told of and left out."""
    manager = pluggy.PluginManager(HOOK_GROUP)
    manager.add_hookspecs(Hooks)
    plugins = installed(left_out, HOOK_GROUP)
    reasons = [_register(manager, plugin, name_clash(plugin, plugins)) for plugin in plugins]
    return Extensions(manager.hook, tuple(reason for reason in reasons if reason))


def _register(manager: pluggy.PluginManager, plugin: Installed, clash: str) -> str:
    """Register one plugin; return why it could not be, or ''."""
    if clash:
        return f"{plugin.where}: {clash}"
    registered = None
    try:
        registered = plugin.load()
        manager.register(registered, name=plugin.name)
        manager.check_pending()
    except DstrainError as error:
        return f"{error.where}: {error.what}"
    except (pluggy.PluginValidationError, ValueError) as error:
        if manager.has_plugin(plugin.name):
            manager.unregister(registered)
        return f"{plugin.where}: {error}"
    return ""
