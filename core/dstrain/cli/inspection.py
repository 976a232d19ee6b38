"""Find out what each installed plugin offers, by importing it in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import astuple, dataclass, field

import click

from dstrain.cli.click_options import COMMAND_NAMES
from dstrain.errors import DstrainError
from dstrain.registry.discovery import (
    GROUP,
    HOOK_GROUP,
    Installed,
    checked_family,
    installed,
    refuse_clash,
)
from dstrain.registry.hooks import registered

IMPORT_TIMEOUT = 60.0
"""Seconds after which the import of a plugin is given up."""


@dataclass
class Finding:
    """A plugin with what it offers, or why it cannot be used."""

    name: str
    distribution: str
    version: str
    variants: list[str] = field(default_factory=list)
    """Variants of a family."""
    adds: list[str] = field(default_factory=list)
    """Additions of another plugin, in words."""
    state: str = "ready"
    """'ready' or 'broken'."""
    reason: str = ""
    """Why it is broken."""


def inspect_all(disabled_plugins: Collection[str] = ()) -> list[Finding]:
    """Import every plugin in a process of its own, so that a broken one harms nothing
    else.
    """
    findings = []
    for group in (GROUP, HOOK_GROUP):
        plugins = installed(disabled_plugins, group)
        for plugin in plugins:
            found = Finding(plugin.name, plugin.distribution, plugin.version)
            try:
                refuse_clash(plugin, plugins)
                found.variants, found.adds, found.reason = _inspect(plugin)
            except DstrainError as error:
                found.reason = error.what
            if found.reason:
                found.state = "broken"
            findings.append(found)
    return findings


def _inspect(plugin: Installed) -> tuple[list[str], list[str], str]:
    """Return a plugin's variants, what it adds, and why it cannot be used."""
    code = "from dstrain.cli.inspection import _report; _report()"
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, json.dumps(astuple(plugin))],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], [], f"its import took longer than {IMPORT_TIMEOUT:.0f} s"
    if child.returncode != 0 or not child.stdout:
        reason = f"its import ended the process (exit code {child.returncode}) {child.stderr[-200:]}"
        return [], [], reason.strip()
    variants, adds, reason = json.loads(child.stdout)
    return variants, adds, reason


def _report() -> None:
    """In the child of `_inspect`: write what the plugin offers as JSON, and nothing
    that the plugin prints.
    """
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        plugin = Installed(*json.loads(sys.argv[1]))
        variants: tuple[str, ...] = ()
        adds: list[str] = []
        try:
            if plugin.group == HOOK_GROUP:
                adds, reason = _additions(plugin)
            else:
                family = checked_family(plugin)
                variants = family.variants
                reason = next(family.missing_targets(), "")
        except DstrainError as error:
            reason = error.what
        json.dump([variants, adds, reason], channel)


def _additions(plugin: Installed) -> tuple[list[str], str]:
    """Return what an extension adds, in words, and why part of it cannot be used."""
    alone = registered((plugin,))
    commands = alone.offered("dstrain_commands", click.Command, COMMAND_NAMES)
    adds = [f"command {name}" for name in commands]
    if alone.implement("dstrain_tasks"):
        from dstrain.graph.task import Task
        from dstrain.training.distill import OWN_TASKS  # imports torch

        tasks = alone.offered("dstrain_tasks", Task, OWN_TASKS)
        adds += [f"task {name}" for name in tasks]
    if alone.implement("dstrain_quantizers"):
        from dstrain.graph.quantization import QuantizationMethod
        from dstrain.models.quantization.methods import METHODS  # imports torch

        methods = alone.offered("dstrain_quantizers", QuantizationMethod, METHODS)
        adds += [f"quantization method {name}" for name in methods]
    if alone.implement("dstrain_step_end"):
        adds.append("reads the numbers of each step")
    if alone.implement("dstrain_modify_step"):
        adds.append("changes training after each step")
    prefix = f"{plugin.where}: "
    return adds, "; ".join(reason.removeprefix(prefix) for reason in alone.broken)
