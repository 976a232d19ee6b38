"""Compute what identifies a plan: everything that its cached values depend on and that is
known before a file is opened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dstrain.config.fields import split_commas
from dstrain.config.options import options_affecting
from dstrain.data.cells import loader_version
from dstrain.data.dataset import as_cut_from_video
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, Constant, Measured
from dstrain.graph.plan import Plan
from dstrain.graph.task import NEGATIVE
from dstrain.runs.setup import Setup

NO_CONTENT = ("optional", "check")
"""Fields of a column that decide which rows there are, but no value."""


def plan_identity(setup: Setup, input_sets: Sequence[frozenset[str]]) -> dict[str, Any]:
    """Return what must be equal in both stages, each fact by its name in errors.

    Args:
        setup: The run.
        input_sets: The sets of inputs that its samples have. Each has a plan of its own,
            and all of these count.
    """
    spec = setup.spec
    facts: dict[str, Any] = {
        "family": spec.family,
        "variant": spec.variant,
        "task": setup.task.name,
        "branches": list(setup.task.branches),
    }
    plans = []
    present = frozenset[str]().union(*input_sets)
    for inputs in input_sets:
        try:
            plan = setup.plan(inputs)
        except UsageError as error:
            facts[f"plan{_lacking(setup, present - inputs)}"] = f"none: {error.what}"
            continue
        plans.append(plan)
        stored = f"cached values{_lacking(setup, present - inputs)}"
        facts[stored] = list(plan.cached_values)
        for fact, value in _unit_facts(plan):
            # Most sets of inputs share most units: only what differs is repeated.
            if facts.setdefault(fact, value) != value:
                facts[fact + _lacking(setup, present - inputs)] = value
    used = frozenset[str]().union(*(plan.used_inputs for plan in plans))
    for name in sorted(used):
        facts |= _input_facts(setup, name)
    preset = setup.preset
    flags = _flags(setup)
    merged_in = {name for plan in plans for name in plan.components["data_process"]}
    if preset is not None and preset.component in merged_in:
        flags["--preset_lora_path"] = f"{preset.digest} in {preset.component}"
    constants = {f"--{name}": one.value for name, one in spec.constants.items()}
    dtype = str(setup.dtype).removeprefix("torch.")
    return {**facts, **flags, "dtype": dtype, **constants}


def _lacking(setup: Setup, absent: frozenset[str]) -> str:
    """Return the words for rows that lack these inputs; none for rows that have all."""
    names = [
        name
        for name in sorted(absent)
        if not isinstance(setup.spec.inputs.get(name), Measured | Constant)
    ]
    return f" for rows without {', '.join(names)}" if names else ""


def _unit_facts(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield what identifies the cached steps of a plan."""
    for step in plan.cached_steps:
        branch = ", negative branch," if step.branch == NEGATIVE else ""
        where = f"unit {step.unit.name}{branch}"
        for fact, value in step.unit.identity.items():
            yield f"{where} {fact}", value
        yield f"{where} reads", dict(sorted(step.inputs.items()))
        yield f"{where} uses", sorted(step.unit.components)


def _input_facts(setup: Setup, name: str) -> dict[str, Any]:
    """Return where an input comes from, and how it is loaded."""
    source = setup.spec.inputs[name]
    if isinstance(source, Measured):
        return {f"input {name} is": f"the {source.axis} of {source.of}"}
    if not isinstance(source, Column):
        return {}
    column = as_cut_from_video(source, setup.spec.inputs.values())
    facts = {
        f"input {name} {field}": value
        for field, value in asdict(column).items()
        if field not in NO_CONTENT
    }
    if column.is_file:
        facts[f"input {name} loader"] = loader_version(column)
    return facts


def _flags(setup: Setup) -> dict[str, Any]:
    """Return the options that cached values depend on, each as one of the ways in which
    it can be written.
    """
    config = setup.config
    flags = {f"--{name}": getattr(config, name) for name in options_affecting("cache")}
    if config.height:
        flags["--max_pixels"] = None
    data_file_keys = split_commas(config.data_file_keys)
    flags["--data_file_keys"] = ",".join(data_file_keys) or None
    extra_inputs = sorted(split_commas(config.extra_inputs))
    flags["--extra_inputs"] = ",".join(extra_inputs) or None
    if not setup.spec.reads_videos:
        for name in options_affecting("video"):
            del flags[f"--{name}"]
    return flags
