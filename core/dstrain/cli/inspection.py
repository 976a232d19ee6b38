"""Find out what each installed plugin offers, by importing it in a process of its own."""

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

IMPORT_TIMEOUT = 60.0
"""Seconds after which the import of a plugin is given up."""


@dataclass(frozen=True)
class Finding:
    """What one plugin offers, or why it cannot be used."""

    plugin: Installed
    variants: tuple[str, ...] = ()
    """Variants of a family."""
    adds: tuple[str, ...] = ()
    """What another plugin adds, in words."""
    reason: str = ""
    """Why it cannot be used; '' for one that can."""

    @property
    def state(self) -> str:
        """Return 'ready' or 'broken'."""
        return "broken" if self.reason else "ready"


def inspect_all(left_out: Collection[str] = ()) -> tuple[Finding, ...]:
    """Import every plugin in a process of its own, so that a broken one harms nothing
    else.
    """
    findings = []
    for plugins in (installed(left_out), installed(left_out, HOOK_GROUP)):
        findings += [
            _inspect(plugin, name_clash(plugin, plugins)) for plugin in plugins
        ]
    return tuple(findings)


def _inspect(plugin: Installed, clash: str) -> Finding:
    if clash:
        return Finding(plugin, reason=clash)
    code = "from dstrain.cli.inspection import _report; _report()"
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, json.dumps(asdict(plugin))],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"its import took longer than {IMPORT_TIMEOUT:.0f} s"
        return Finding(plugin, reason=reason)
    if child.returncode != 0 or not child.stdout:
        reason = f"its import ended the process (exit code {child.returncode}) {child.stderr[-200:]}"
        return Finding(plugin, reason=reason.strip())
    variants, adds, reason = json.loads(child.stdout)
    return Finding(plugin, tuple(variants), tuple(adds), reason)


def _report() -> None:
    """In the child of `_inspect`: write the finding as JSON, and nothing that the
    plugin prints.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plugin = Installed(**json.loads(sys.argv[1]))
    variants: tuple[str, ...] = ()
    adds: list[str] = []
    try:
        if plugin.group == HOOK_GROUP:
            adds, reason = _additions(plugin)
        else:
            family = checked_family(plugin)
            variants, reason = family.variants, next(family.missing_targets(), "")
    except DstrainError as error:
        reason = error.what
    json.dump([variants, adds, reason], channel)
    channel.close()


def _additions(plugin: Installed) -> tuple[list[str], str]:
    """Return what an extension adds, in words, and why part of it cannot be used."""
    alone = registered((plugin,))
    callers = alone.manager.get_hookcallers(alone.manager.get_plugin(plugin.name))
    hooks = {hook.name for hook in callers or ()}
    adds: list[str] = []
    broken = [*alone.broken]
    if "dstrain_commands" in hooks:
        own = alone.offered("dstrain_commands", click.Command, COMMAND_NAMES)
        adds += [f"command {name}" for name in own.items]
        broken += own.broken
    if "dstrain_tasks" in hooks:
        from dstrain.graph.task import Task
        from dstrain.training.distill import OWN_TASKS  # imports torch

        tasks = alone.offered("dstrain_tasks", Task, OWN_TASKS)
        adds += [f"task {name}" for name in tasks.items]
        broken += tasks.broken
    if "dstrain_step_end" in hooks:
        adds.append("reads the numbers of each step")
    prefix = f"{plugin.where}: "
    return adds, "; ".join(reason.removeprefix(prefix) for reason in broken)
