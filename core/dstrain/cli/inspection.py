"""Find out what each installed plugin offers, by importing it in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import click

from dstrain.cli.click_options import COMMAND_NAMES
from dstrain.errors import DstrainError
from dstrain.graph import Column
from dstrain.installed import GROUP, HOOK_GROUP, Installed, installed, refuse_clash
from dstrain.registry import ModelFamily, checked_family

IMPORT_TIMEOUT = 60.0
"""Seconds after which the import of a plugin is given up."""
SHOWN = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "sampler",
    "guidance_scale",
)
"""Defaults of a variant that its description has."""


ADDED = MappingProxyType(
    {
        "dstrain_keepers": "ways to keep weights",
        "dstrain_observers": "observes training",
        "dstrain_updater": "may update weights in a way of its own",
        "dstrain_modify_step": "changes training after each step",
    }
)
"""Hook -> what a plugin that implements it does."""


@dataclass
class Finding:
    """A plugin with what it offers, or why it cannot be used."""

    name: str
    distribution: str
    version: str
    variants: list[str] = field(default_factory=list)
    """Variants of a family."""
    model_ids: dict[str, str] = field(default_factory=dict)
    """Model ids that a family knows, and patterns of further ones -> variant, or ''."""
    adds: list[str] = field(default_factory=list)
    """Additions of another plugin, in words."""
    state: str = "ready"
    """'ready' or 'broken'."""
    reason: str = ""
    """Why it is broken."""


def inspect_all(
    disabled_plugins: Collection[str] = (), groups: Sequence[str] = (GROUP, HOOK_GROUP)
) -> list[Finding]:
    """Import every plugin of these groups of entry points, without the disabled ones,
    each in a process of its own, so that a broken one harms nothing else.
    """
    findings: list[Finding] = []
    # Starting a process takes longer than what it does.
    with ThreadPoolExecutor() as threads:
        for group in groups:
            plugins = installed(disabled_plugins, group)
            findings += threads.map(partial(_finding, plugins=plugins), plugins)
    return findings


def variant_lines(family: ModelFamily, variant: str) -> Iterator[tuple[str, str]]:
    """Yield what a variant needs and makes, each with its heading; imports torch."""
    spec = family.spec(variant)
    columns = {
        name: source
        for name, source in spec.inputs.items()
        if isinstance(source, Column)
    }
    needed = [one for one in columns.values() if not one.optional]
    files = {one.name: one.file_type if one.is_file else one.kind for one in needed}
    yield "columns", ", ".join(f"{name} ({kind})" for name, kind in files.items())
    more = [
        name if name == one.name else f"{name} (from {one.name})"
        for name, one in columns.items()
        if one.optional
    ]
    if more:
        yield "--extra_inputs", ", ".join(more)
    makes = "video" if spec.makes_video else "image"
    makes = "images" if spec.makes_layers else makes
    defaults = [
        f"--{name} {spec.defaults[name]}" for name in SHOWN if name in spec.defaults
    ]
    if defaults:
        makes += f", by default with {' '.join(defaults)}"
    yield "makes", makes
    trained = spec.defaults_of_training.items()
    yield "is trained", "with " + " ".join(f"--{name} {one}" for name, one in trained)
    # It imports torch, as the family has by now.
    from dstrain.pipeline.sampler import samplers_of

    yield "samplers", ", ".join(samplers_of(spec))
    yield "components", ", ".join(spec.components)
    known = family.known_models.items()
    ids = [one for one, of in known if variant in of.split(", ")]
    if ids:
        yield "model ids", ", ".join(ids)


def _finding(plugin: Installed, plugins: Collection[Installed]) -> Finding:
    found = Finding(plugin.name, plugin.distribution, plugin.version)
    try:
        refuse_clash(plugin, plugins)
        _inspect(plugin, found)
    except DstrainError as error:
        found.reason = error.what
    if found.reason:
        found.state = "broken"
    return found


def _inspect(plugin: Installed, found: Finding) -> None:
    """Note what a plugin offers, or why it cannot be used."""
    code = "from dstrain.cli.inspection import _report; _report()"
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.run(
            [sys.executable, "-c", code, json.dumps(astuple(plugin))],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=IMPORT_TIMEOUT,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        found.reason = f"its import took longer than {IMPORT_TIMEOUT:.0f} s"
        return
    if child.returncode != 0 or not child.stdout:
        code_and_end = f"(exit code {child.returncode}) {child.stderr[-200:]}"
        found.reason = f"its import ended the process {code_and_end}".strip()
        return
    for name, value in json.loads(child.stdout).items():
        setattr(found, name, value)


def _report() -> None:
    """In the child of `_inspect`: write what the plugin offers as JSON, and nothing
    that the plugin prints.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)
        plugin = Installed(*json.loads(sys.argv[1]))
        offer: dict[str, Any] = {}
        try:
            if plugin.group == HOOK_GROUP:
                offer["adds"], offer["reason"] = _additions(plugin)
            else:
                family = checked_family(plugin)
                offer["variants"] = family.variants
                offer["model_ids"] = family.known_models
                offer["reason"] = next(family.missing_targets(), "")
        except DstrainError as error:
            offer = {"reason": error.what}
        json.dump(offer, channel)


def _additions(plugin: Installed) -> tuple[list[str], str]:
    """Return what an extension adds, in words, and why part of it cannot be used."""
    from dstrain.registry import registered  # imports pluggy

    alone = registered((plugin,))
    commands = alone.offered("dstrain_commands", click.Command, COMMAND_NAMES)
    adds = [f"command {name}" for name in commands]
    # What imports torch is imported where it is needed.
    if alone.implement("dstrain_tasks"):
        from dstrain.graph import Task
        from dstrain.training import OWN_TASKS

        tasks = alone.offered("dstrain_tasks", Task, OWN_TASKS)
        adds += [f"task {name}" for name in tasks]
    if alone.implement("dstrain_lora_formats"):
        from dstrain.lora import LoraFormat
        from dstrain.lora.file_formats import OWN

        formats = alone.offered("dstrain_lora_formats", LoraFormat, (OWN.name,))
        adds += [f"LoRA format {name}" for name in formats]
    if alone.implement("dstrain_lora_types"):
        from dstrain.lora.types import LORA, LoraType

        types = alone.offered("dstrain_lora_types", LoraType, (LORA.name,))
        adds += [f"LoRA type {name}" for name in types]
    if alone.implement("dstrain_hints"):
        adds.append(f"{len(alone.hints())} hints")
    adds += [words for hook, words in ADDED.items() if alone.implement(hook)]
    prefix = f"{plugin.where}: "
    return adds, "; ".join(reason.removeprefix(prefix) for reason in alone.broken)
