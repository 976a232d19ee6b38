"""Compute what identifies a plan: everything that its cached values depend on and that is
known before a file is opened.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from dstrain.config import datasets_of, split_commas
from dstrain.config.options import TrainConfig, options_affecting, recorded_values
from dstrain.data.cells import loader_version
from dstrain.data.row_checks import as_cut_from_video
from dstrain.data.tables import parse_columns
from dstrain.errors import UsageError
from dstrain.graph import NEGATIVE, Column, Constant, Measured, Plan
from dstrain.models import Config
from dstrain.pipeline import MASK
from dstrain.runs.recorded_versions import component_code
from dstrain.runs.setup import Setup

NO_CONFIGS: Mapping[str, Config] = MappingProxyType({})
VALIDATION = "validation"
"""What the rows of a plan are for, where not for training."""
NO_CONTENT = (
    "optional",
    "check",
    "not_empty",
    "advice",
    "entries",
    "same_size",
    "directed",
)
"""Fields of a column that decide which rows there are, but no value."""


def plan_identity(
    setup: Setup,
    input_sets: Sequence[frozenset[str]],
    configs: Mapping[str, Config] = NO_CONFIGS,
) -> dict[str, Any]:
    """Return what must be equal in both stages: each fact by its name in errors, and
    those of a unit or an input in a record of its own.

    Args:
        input_sets: The sets of inputs that its samples have. Each has a plan of its own,
            and all of these count.
        configs: The configurations of the components, on which it may depend how they are
            kept.
    """
    spec = setup.spec
    facts: dict[str, Any] = {
        "family": spec.family,
        "variant": spec.variant,
        "task": setup.task.name,
        "branches": list(setup.task.branches),
    }
    if setup.is_validation:
        facts["use"] = VALIDATION
    plans = []
    units: dict[str, Any] = {}
    present = frozenset[str]().union(*input_sets)
    for inputs in input_sets:
        rows = _lacking(setup, present - inputs)
        try:
            plan = setup.plan(inputs)
        except UsageError as error:
            facts[f"plan{rows}"] = f"none: {error.what}"
            continue
        plans.append(plan)
        facts[f"cached values{rows}"] = list(plan.cached_values)
        for unit, record in _units(plan):
            # Most sets of inputs share most units: only what differs is repeated.
            if units.setdefault(unit, record) != record:
                units[unit + rows] = record
    facts |= units
    cached_with = {name for plan in plans for name in plan.components["data_process"]}
    for name in sorted(cached_with):
        facts[f"component {name}"] = dict(component_code(setup.family, name))
    used = frozenset[str]().union(*(plan.used_inputs for plan in plans))
    for name in sorted(used):
        record = _input_record(setup, name)
        if record:
            facts[f"input {name}"] = record
    preset = setup.preset
    flags = cache_flags(setup)
    merged = cached_with.intersection(preset.components) if preset else ()
    if preset is not None and merged:
        names = ", ".join(sorted(merged))
        flags["--preset_lora_path"] = f"{preset.digest} in {names}"
    for name in sorted(cached_with):
        for one in setup.keepers.identities(name, configs.get(name)):
            if one.fact:
                is_list = isinstance(one.value, list)
                facts[one.fact] = "; ".join(one.value) if is_list else one.value
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


def _units(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cached steps of a plan by name, with what identifies them."""
    for step in plan.cached_steps:
        branch = ", negative branch," if step.branch == NEGATIVE else ""
        record = {
            **step.unit.identity,
            "reads": dict(sorted(step.inputs.items())),
            "uses": sorted(step.unit.components),
        }
        yield f"unit {step.unit.name}{branch}", record


def _input_record(setup: Setup, name: str) -> dict[str, Any]:
    """Return where an input comes from, and how it is loaded; nothing of a constant."""
    source = setup.spec.inputs[name]
    if isinstance(source, Measured):
        return {"is": f"the {source.axis} of {source.of}"}
    if not isinstance(source, Column):
        return {}
    column = as_cut_from_video(source, setup.spec.inputs.values())
    record = {
        field: value
        for field, value in asdict(column).items()
        if field not in NO_CONTENT
    }
    if not column.of:
        # Most columns are of no masks.
        del record["of"]
    if column.is_file:
        record["loader"] = loader_version(column)
    return record


def cache_flags(setup: Setup) -> dict[str, Any]:
    """Return the options that cached values depend on, each as one of the ways in which
    it can be written.
    """
    config = setup.config
    flags = {
        f"--{name}": value for name, value in recorded_values(config, "cache").items()
    }
    if config.height:
        flags["--max_pixels"] = None
    data_file_keys = split_commas(config.data_file_keys)
    flags |= _flags_of_datasets(config)
    flags["--data_file_keys"] = ",".join(data_file_keys) or None
    columns = parse_columns(config.column)
    if columns:
        named = [f"{name}={column}" for name, column in sorted(columns.items())]
        flags["--column"] = ",".join(named)
    extra_inputs = sorted(split_commas(config.extra_inputs))
    flags["--extra_inputs"] = ",".join(extra_inputs) or None
    if not setup.spec.reads_videos:
        for name in options_affecting("video"):
            flags.pop(f"--{name}", None)
    if any(one.config.crops % 2 == 0 for one in datasets_of(config)):
        # Caches that were filled without it have no centre for validation.
        flags["centre beside an even number of --crops"] = True
    if MASK not in setup.spec.inputs:
        for name in options_affecting("mask"):
            del flags[f"--{name}"]
    return flags


def _flags_of_datasets(config: TrainConfig) -> dict[str, Any]:
    """Return the options that cached values of a dataset depend on and that are its own,
    with its number, from 1; for each dataset at least that there is one.
    """
    flags: dict[str, Any] = {}
    entries = replace(config, dataset_base_path=None)
    for number, one in enumerate(datasets_of(entries) if config.dataset else (), 1):
        flags[f"--dataset {number}"] = "given"
        for name in options_affecting("cache"):
            value = getattr(one.config, name)
            if value != getattr(config, name):
                flags[f"--dataset {number} {name}"] = value
    return flags
