"""Plan inference with the prompts of rows that plugins add, split into stages by the
same rule as training.

In stage 1 the cached steps run, and values are stored under the same keys as those of
rows; the rest runs in stage 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dstrain.cache import FeatureCache
from dstrain.data import Cell, Resolution, fit, inputs_of
from dstrain.data.row_checks import check_rows
from dstrain.errors import CacheError, UsageError
from dstrain.graph import (
    NEGATIVE,
    Column,
    Measured,
    PipelineSpec,
    Plan,
    as_column,
    deserialize,
    make_plan,
    serialize,
)
from dstrain.graph.noise_process import EULER
from dstrain.models.functional import check_sides
from dstrain.pipeline import SamplerOptions, generate_task, plan_inference
from dstrain.registry import PromptRow
from dstrain.runs.datasets.flags import most_frames, resolutions_of
from dstrain.runs.setup import Setup

PIXELS = 512 * 512
"""The most pixels of an image, or of a frame, without --height and --width: a look, not a
result.
"""
TOY_PIXELS = 128 * 128
TOY_FRAMES = 5
"""The same for a toy, whose images are noise at any size, and its most frames: 4n + 1,
as video models want it.
"""
RECORDED = ("num_inference_steps", "guidance_scale", "rand_device", "sampler")
"""Fields of `SamplerOptions` that a feature cache keeps with a row; its seed is that of
the run that makes it.
"""


@dataclass(frozen=True)
class PromptPlan:
    """Inference with one prompt, split by what is trained."""

    row: PromptRow
    plan: Plan
    sampling: SamplerOptions
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """Its inputs, decoded when they are needed."""
    cached_values: Mapping[str, Any] | None = None
    """In stage 2, what the feature cache has in place of them."""


def plan_rows(setup: Setup) -> list[PromptPlan]:
    """Plan inference with each prompt, with the variant's defaults; reads no file but
    the dataset's.

    Raises UsageError for a variant that cannot make images of them, with the reason.
    """
    spec = setup.spec
    found: list[PromptPlan] = []
    shared: dict[str, Any] | None = None
    for row in setup.prompt_rows:
        try:
            if shared is None:
                shared = _shared_arguments(setup)
            own = {**row.arguments, "prompt": row.prompt}
            call = plan_inference(spec, {**shared, **own})
            if {"height", "width"} & own.keys() and (unit := _multiple(spec, "height")):
                # A side that is not its own is right already.
                check_sides(own.get("height", unit), own.get("width", unit), unit)
            guided = NEGATIVE in call.plan.task.branches
            plan = inference_plan(setup, call.inputs, guided)
            cells = {}
            for name in plan.used_inputs:
                value = call.inputs[name]
                if not isinstance(value, Cell):
                    # As a dataset would have it, so that both have one key.
                    value = Cell(as_column(name, spec.inputs[name]).kind, value)
                cells[name] = value
            found.append(PromptPlan(row, plan, call.sampling, cells))
        except UsageError as error:
            what = f"{error.where}: {error.what}"
            raise UsageError(row.option, what, *error.help_lines) from error
    return found


def inference_plan(setup: Setup, inputs: Iterable[str], guided: bool) -> Plan:
    """Return the plan of inference with these inputs, split by what is trained."""
    task = generate_task(setup.spec, guided)
    return make_plan(setup.spec, frozenset(inputs), task, setup.trainables.components)


def _shared_arguments(setup: Setup) -> dict[str, Any]:
    """Return what all rows have in common: sizes, and what only a row can give,
    such as an image to be edited.
    """
    spec = setup.spec
    with_defaults = spec.defaults.keys() & spec.inputs.keys()
    task = generate_task(spec, guided=False)
    plan = make_plan(spec, setup.all_inputs() | with_defaults, task)
    # These have a value without a row.
    others = {*spec.defaults, *spec.cfg_inputs, *spec.cfg_inputs.values()}
    sizes: dict[str, Measured] = {}
    columns: set[str] = set()
    for name in plan.used_inputs:
        source = spec.inputs[name]
        if isinstance(source, Measured):
            sizes[name] = source
        elif isinstance(source, Column) and name not in others:
            columns.add(name)
    arguments: dict[str, Any] = {}
    if columns:
        for name, cell in _first_row_with(setup, columns).items():
            if name in columns or name in sizes:
                arguments[name] = cell
    else:
        arguments |= _sizes(setup, sizes)
    if setup.task.runs_sampler:
        # The number of steps is what is trained, without guidance, by Euler's rule.
        row = setup.dataset.rows[0]
        arguments |= {name: row[name].literal for name in RECORDED if name in row}
        arguments["guidance_scale"] = setup.spec.no_guidance
        arguments["sampler"] = EULER
    return arguments


def _first_row_with(setup: Setup, wanted: set[str]) -> Mapping[str, Cell]:
    """Return the first sample that has most of these inputs, its images as small as
    these are.
    """
    dataset = setup.dataset
    counts = [len(wanted & inputs_of(common)) for common in dataset.signatures]
    first = np.array(counts)[dataset.groups].argmax()
    row, chunk = map(int, dataset.sample_ids[first])
    setup, row = setup.row_of_part(row)
    # Faults of other rows do not concern this one.
    table = setup.checked_dataset.table.chosen([row])
    config = replace(
        setup.data_config, resolution=_resolution(setup), further_resolutions=()
    )
    found = check_rows(table, config, setup.spec.inputs)
    of_samples = found.first_variants
    # Other resolutions may have given more samples.
    return found.rows[int(of_samples[min(chunk, len(of_samples) - 1)])]


def _sizes(setup: Setup, sizes: Mapping[str, Measured]) -> dict[str, int]:
    """Return --height, --width and --num_frames as far as inference reads them, else the
    variant's size, of at most PIXELS.
    """
    spec = setup.spec
    defaults = spec.defaults
    names = {own.axis: name for name, own in sizes.items() if name in defaults}
    found = {}
    if "height" in names:
        height, width = names["height"], names["width"]
        size = (defaults[height], defaults[width])
        most = _resolution(setup)
        found[height], found[width] = fit(size, most, _multiple(spec, height))
    if "frames" in names:
        frames = most_frames(setup.config)
        found[names["frames"]] = min(frames, TOY_FRAMES) if setup.config.toy else frames
    return found


def _multiple(spec: PipelineSpec, height: str) -> int:
    """Return what the sides of an image are multiples of; 0 where any size will do."""
    source = spec.inputs[height]
    column = spec.inputs[source.of] if isinstance(source, Measured) else source
    return column.multiple if isinstance(column, Column) else 0


def _resolution(setup: Setup) -> Resolution:
    most = TOY_PIXELS if setup.config.toy else PIXELS
    resolution = resolutions_of(setup.config)[0]
    return replace(
        resolution, max_pixels=min(resolution.max_pixels, most), buckets=None
    )


def kept_options(sampling: SamplerOptions) -> dict[str, Any]:
    """Return what is kept with a row; Euler's rule, which all had once, is not named."""
    values = {name: getattr(sampling, name) for name in RECORDED}
    return {name: value for name, value in values.items() if value != EULER}


def row_line(planned: PromptPlan, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of such a row in a feature cache, with its sampling options."""
    values: dict[str, Any] = {name: {"at": at} for name, at in addresses.items()}
    for name in planned.plan.cached_values:
        if name not in addresses:
            values[name] = serialize(planned.cells[name].literal, {}, name)
    return {
        "prompt": planned.row.text,
        "inputs": sorted(planned.plan.inputs),
        "branches": list(planned.plan.task.branches),
        "sampling": kept_options(planned.sampling),
        "values": values,
    }


def stored_rows(
    setup: Setup, cache: FeatureCache, recorded: Sequence[Mapping[str, Any]]
) -> list[PromptPlan]:
    """Return the rows asked for, with their cached values.

    Raises StateError naming those that the cache lacks.
    """
    lines = {line["prompt"]: line for line in recorded}
    found = []
    missing: dict[str, list[str]] = {}
    for row in setup.prompt_rows:
        line = lines.get(row.text)
        planned = None if line is None else _stored(setup, cache, row, line)
        if planned is None:
            missing.setdefault(row.option, []).append(repr(row.text))
        else:
            found.append(planned)
    for option, texts in missing.items():
        what = f"contains no values for {option} {', '.join(texts)}"
        raise CacheError(cache.folder, what)
    return found


def _stored(
    setup: Setup, cache: FeatureCache, row: PromptRow, line: Mapping[str, Any]
) -> PromptPlan | None:
    """Return one row with its values; None if what is trained now needs others."""
    plan = recorded_plan(setup, line)
    forms = line["values"]
    if not forms.keys() >= set(plan.cached_values):
        return None
    if any("at" in form and form["at"] not in cache for form in forms.values()):
        return None
    values = {
        name: cache.read(form["at"]) if "at" in form else deserialize(form, {})
        for name, form in forms.items()
    }
    sampling = SamplerOptions(**line["sampling"])
    return PromptPlan(row, plan, sampling, cached_values=values)


def recorded_plan(setup: Setup, line: Mapping[str, Any]) -> Plan:
    """Return the plan of a row as it is now."""
    return inference_plan(setup, line["inputs"], NEGATIVE in line["branches"])
