"""What is installed and what it is good for: every plugin imported, each in a process
of its own. Imports no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass

import click

from dstrain.cli.options import COMMAND_NAMES
from dstrain.errors import DstrainError
from dstrain.registry.discovery import (
    HOOK_GROUP,
    Installed,
    checked_family,
    installed,
    name_clash,
)
from dstrain.registry.hooks import registered

PATIENCE = 60.0
"""Seconds that `inspect_all` gives one record's import."""


@dataclass(frozen=True)
class Finding:
    """What `inspect_all` found out about one plugin; `reason` is '' for one that can be
    used.

    variants: those of a family. adds: in words, what another plugin adds.
    """

    plugin: Installed
    variants: tuple[str, ...] = ()
    reason: str = ""
    adds: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """'ready' or 'broken'."""
        return "broken" if self.reason else "ready"


def inspect_all(left_out: Collection[str] = ()) -> tuple[Finding, ...]:
    """Import every plugin, each in a process of its own, so that a broken one is
    reported and harms nothing else.
    """
    groups = [installed(left_out), installed(left_out, HOOK_GROUP)]
    return tuple(
        _inspect(plugin, name_clash(plugin, plugins))
        for plugins in groups
        for plugin in plugins
    )


def _inspect(plugin: Installed, clash: str) -> Finding:
    if clash:
        return Finding(plugin, reason=clash)
    code = "from dstrain.cli.inspection import _answer; _answer()"
    command = [sys.executable, "-c", code, json.dumps(asdict(plugin))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(plugin, reason=f"its import took longer than {PATIENCE:.0f} s")
    if child.returncode != 0 or not child.stdout:
        return Finding(
            plugin,
            reason=f"its import ended the process (exit code {child.returncode}) {child.stderr[-200:]}".strip(),
        )
    answer = json.loads(child.stdout)
    return Finding(
        plugin, tuple(answer["variants"]), answer["reason"], tuple(answer["adds"])
    )


def _answer() -> None:
    """In the child of `_inspect`: write variants and reason as JSON, and nothing that
    the plugin prints.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plugin = Installed(**json.loads(sys.argv[1]))
    variants: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    reason = ""
    try:
        if plugin.group == HOOK_GROUP:
            words, reason = _adds(plugin)
        else:
            family = checked_family(plugin)
            variants, reason = family.variants, next(family.lacking(), "")
    except DstrainError as error:
        reason = error.what
    json.dump({"variants": variants, "adds": words, "reason": reason}, channel)
    channel.close()


def _adds(plugin: Installed) -> tuple[tuple[str, ...], str]:
    """What a plugin of the group adds, in words, and why it cannot be used; for a
    process of its own.
    """
    alone = registered((plugin,))
    if alone.broken:
        return (), alone.broken[0].removeprefix(f"{plugin.where}: ")
    hooks = [
        hook.name
        for hook in alone.manager.get_hookcallers(alone.manager.get_plugin(plugin.name))
        or ()
    ]
    words: list[str] = []
    reasons: list[str] = []
    if "dstrain_commands" in hooks:
        own = alone.offered("dstrain_commands", click.Command, COMMAND_NAMES)
        words, reasons = [f"command {name}" for name in own.items], [*own.broken]
    if "dstrain_tasks" in hooks:
        from dstrain.graph.task import Task
        from dstrain.training.distill import OWN_TASKS  # imports torch

        tasks = alone.offered("dstrain_tasks", Task, OWN_TASKS)
        words, reasons = (
            [*words, *(f"task {name}" for name in tasks.items)],
            [*reasons, *tasks.broken],
        )
    words += ["looks on at each step"] if "dstrain_step_end" in hooks else []
    return tuple(words), "; ".join(
        reason.removeprefix(f"{plugin.where}: ") for reason in reasons
    )
