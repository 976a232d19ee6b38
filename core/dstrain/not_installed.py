"""Say how what a plugin of this project adds can be had where it is not installed."""

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.installed import GROUP, HOOK_GROUP, OPTIONS_GROUP, installed

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
    option whose value it is, such as lora_type.
    """
    for plugin, adds in _absent().items():
        if name not in adds.get(kind, {}):
            continue
        if not _is_there(plugin):
            place = f"pip install ./plugins/{plugin}"
            return f"it is of plugin-{plugin}: in the folder of the project, {place}"
        if not _is_there(plugin, disabled_plugins):
            return f"it is of plugin-{plugin}, which -p disables"
    return ""


def absent_names(kind: str) -> set[str]:
    """Return what plugins of this project add of a kind that are not installed."""
    names = {name for adds in _absent().values() for name in adds.get(kind, {})}
    return {name for name in names if how_to_have(kind, name)}


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


def _is_there(plugin: str, disabled_plugins: Collection[str] = ()) -> bool:
    groups = (GROUP, HOOK_GROUP, OPTIONS_GROUP)
    return any(
        one.distribution == f"plugin-{plugin}"
        for group in groups
        for one in installed(disabled_plugins, group)
    )
