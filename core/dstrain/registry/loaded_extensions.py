"""Import and register the plugins that implement hooks, without those that are disabled."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import pluggy

from dstrain.errors import DstrainError, UsageError
from dstrain.installed import (
    HOOK_GROUP,
    Installed,
    described,
    installed,
    refuse_clash,
    refuse_other_interface,
)
from dstrain.registry.extensions import Extensions, told
from dstrain.registry.hooks import RETIRED, Hooks

_disabled: ContextVar[tuple[str, ...]] = ContextVar("disabled_plugins", default=())


@contextmanager
def disabling(plugins: Collection[str]) -> Iterator[None]:
    """Leave plugins out of `extensions_in_use` within, and in threads that run in this
    context: a command says it once, and what reads a file need not be told.
    """
    before = _disabled.set(tuple(plugins))
    others = told.set(told.get(set[str]()))
    try:
        yield
    finally:
        _disabled.reset(before)
        told.reset(others)


def disabled_plugins() -> tuple[str, ...]:
    """Return what `disabling` names."""
    return _disabled.get()


def extensions_in_use() -> Extensions:
    """Return the plugins of the group without those that `disabling` names."""
    return _registered_once(installed(disabled_plugins(), HOOK_GROUP), tuple(sys.path))


@lru_cache(maxsize=4)
def _registered_once(
    plugins: tuple[Installed, ...], places: tuple[str, ...]
) -> Extensions:
    # The same plugin may be found in another of the places.
    return registered(plugins)


def load_extensions(disabled_plugins: Collection[str] = ()) -> Extensions:
    """Import and register every installed plugin of the group."""
    return registered(installed(disabled_plugins, HOOK_GROUP))


def registered(plugins: Collection[Installed]) -> Extensions:
    """Import and register plugins of the group; those that are broken are left out."""
    managers = {}
    broken = []
    for plugin in plugins:
        manager = pluggy.PluginManager(HOOK_GROUP)
        manager.add_hookspecs(Hooks)
        try:
            refuse_clash(plugin, plugins)
            module = plugin.load()
            refuse_other_interface(plugin, getattr(module, "api", 1))
            for old, new in RETIRED.items():
                if hasattr(module, old):
                    what = f"{old} is no hook any more; implement {new}"
                    raise UsageError(plugin.where, what)
            manager.register(module, name=plugin.name)
            manager.check_pending()
        except DstrainError as error:
            broken.append(f"{error.where}: {error.what}")
        except Exception as error:
            broken.append(f"{plugin.where}: {described(error)}")
        else:
            managers[plugin] = manager
    return Extensions(managers, broken)
