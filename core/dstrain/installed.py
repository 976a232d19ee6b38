"""Find installed plugins by their metadata. Imports no torch."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError, UsageError

API = 2
"""Version of the plugin interface; what was made for another one is not usable."""
GROUP = "dstrain.models"
"""The group of families' records."""
HOOK_GROUP = "dstrain"
"""The group of modules with hooks."""
OPTIONS_GROUP = "dstrain.options"
"""The group of records of options."""
COMMAND_GROUP = "dstrain.commands"
"""The group of the commands that hooks add: help lists them without an import."""


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
    """Return the plugins of a group, sorted by name, without importing any; disabled
    are names of plugins, or of distributions.
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
    return tuple(
        sorted(
            Installed(entry.name, dist.name, dist.version, entry.value, group)
            for entry in importlib.metadata.entry_points(group=group)
            if (dist := entry.dist) is not None
        )
    )


def _changed_at(place: str) -> int:
    """Return when a folder of sys.path changed, in nanoseconds; 0 if it is not there."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


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


def refuse_other_interface(plugin: Installed, made_for: Any) -> None:
    """Raise UsageError for a plugin made for another version of the interface."""
    if made_for != API:
        raise UsageError(
            plugin.where,
            f"it was made for plugin interface {made_for!r}, this dstrain has {API}",
            "install compatible versions of the plugin and of dstrain",
        )


def described(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


@dataclass
class NamingPlugin:
    """Within, something of a plugin is called: errors that are neither dstrain's nor the
    machine's name the plugin; '' for what is dstrain's own.
    """

    plugin: str
    what: str

    def __enter__(self) -> None:
        """Call it."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise UsageError naming the plugin."""
        if not self.plugin or not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, (DstrainError, MemoryError)):
            return
        # Libraries raise one without a number for damaged files, too.
        if isinstance(error, OSError) and error.errno is not None:
            return
        # torch's of a device
        if type(error).__name__ != "OutOfMemoryError":
            what = f"{self.what} raised {described(error)}"
            raise UsageError(self.plugin, what) from error


ABSENT = Path(__file__).with_name("not_installed.json")
"""What this project's plugins add, by plugin and kind; `tools/not_installed.py` writes it."""


@cache
def _absent() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(ABSENT.read_text("utf-8"))
    return found


def how_to_have(kind: str, name: str, disabled_plugins: Collection[str] = ()) -> str:
    """Return how to have what a plugin of this project adds, where that one is not
    installed, or is disabled; '' if none adds it.

    kind: options, generate (those of them that change what it makes), commands, or the
    option whose value it is: of model, also an id.
    """
    for plugin, adds in _absent().items():
        if not any(fnmatchcase(name, one) for one in adds.get(kind, {})):
            continue
        distribution = f"plugin-{plugin.replace('_', '-')}"
        if not _is_there(distribution):
            return f"it is of {distribution}: {how_to_install(plugin)}"
        if not _is_there(distribution, disabled_plugins):
            return f"it is of {distribution}, which -p disables"
    return ""


def how_to_install(plugin: str) -> str:
    """Return the advice that installs a plugin of this project."""
    return f"in the folder of the project, pip install -c constraints.txt ./plugins/{plugin}"


def absent_names(kind: str) -> set[str]:
    """Return what plugins of this project add of a kind that are not installed."""
    return {
        name
        for adds in _absent().values()
        for name in adds.get(kind, {})
        if how_to_have(kind, name)
    }


def is_default_of_absent(option: str, value: object) -> bool:
    """Return whether a written configuration has an option of a plugin that is not
    installed at its default, where it says nothing.
    """
    for adds in _absent().values():
        options = adds.get("options", {})
        if option in options:
            default = str(options[option])
            return str(value) in ("[]", default, default.lower())
    return False


def _is_there(distribution: str, disabled_plugins: Collection[str] = ()) -> bool:
    return any(
        one.distribution == distribution
        for group in (GROUP, HOOK_GROUP)
        for one in installed(disabled_plugins, group)
    )
