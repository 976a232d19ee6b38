"""What --preview_prompt asks for: inference with each prompt, split into stages by the
same rule as training.

stage 1  the frozen units run; what crosses is stored under the same keys as what rows
need stage 2  the live units, the sampler and the decoders
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.cache.store import FeatureCache
from dstrain.data.cells import Cell
from dstrain.data.dataset import check_rows
from dstrain.data.images import Resolution, fit
from dstrain.errors import StateError, UsageError
from dstrain.graph.inputs import Column, Measured, as_column
from dstrain.graph.plan import Plan, make_plan
from dstrain.graph.values import deserialize, serialize
from dstrain.pipeline.sampling import NEGATIVE, Sampling, generate_task, plan_inference
from dstrain.runs.setup import Setup

PIXELS = 512 * 512
"""The most pixels of a preview, or of a frame of it, without --height and --width: a
look, not a result.
"""
RECORDED = ("num_inference_steps", "guidance_scale", "rand_device")
"""Fields of `Sampling` that a feature cache keeps with a preview; its seed is that of
the run that makes it.
"""


@dataclass(frozen=True)
class Preview:
    """Inference with one prompt. plan: split by what is trained."""

    prompt: str
    plan: Plan
    sampling: Sampling


@dataclass(frozen=True)
class PreviewPlan(Preview):
    """A preview as the command line asks for it. cells: its inputs, decoded when they
    are needed.
    """

    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class StoredPreview(Preview):
    """A preview with the values that cross, read from a feature cache."""

    values: Mapping[str, Any]


def plan_previews(setup: Setup) -> tuple[PreviewPlan, ...]:
    """Plan inference with each prompt, as the variant's defaults have it; reads no file
    but the data set's.

    Raises UsageError for a variant that cannot be previewed, with the reason.
    """
    if not setup.config.preview_prompt:
        return ()
    try:
        shared = _arguments(setup)
        return tuple(
            _plan_preview(setup, shared, prompt)
            for prompt in setup.config.preview_prompt
        )
    except UsageError as error:
        raise UsageError(
            "--preview_prompt", f"{error.where}: {error.what}", *error.help_lines
        ) from error


def preview_line(preview: PreviewPlan, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a preview in a feature cache: a row, with its sampling
    options.
    """
    literals = [name for name in preview.plan.cached_values if name not in addresses]
    return {
        "prompt": preview.prompt,
        "inputs": sorted(preview.plan.inputs),
        "sides": list(preview.plan.branches),
        "sampling": {name: getattr(preview.sampling, name) for name in RECORDED},
        "values": {
            name: serialize(preview.cells[name].literal, {}, name) for name in literals
        }
        | {name: {"at": at} for name, at in addresses.items()},
    }


def stored_previews(
    setup: Setup, store: FeatureCache, recorded: Sequence[Mapping[str, Any]]
) -> tuple[StoredPreview, ...]:
    """Return the previews asked for, with their cached values.

    Raises StateError naming those that the cache lacks.
    """
    known = {line["prompt"]: line for line in recorded}
    found = [
        _stored(setup, store, known[prompt])
        for prompt in setup.config.preview_prompt
        if prompt in known
    ]
    whole = {preview.prompt: preview for preview in found if preview is not None}
    lacking = [prompt for prompt in setup.config.preview_prompt if prompt not in whole]
    if lacking:
        words = ", ".join(map(repr, lacking))
        raise StateError(
            str(store.folder),
            f"lacks what previews of {words} need",
            f"run --task {setup.task.name}:data_process with the same --preview_prompt",
        )
    return tuple(whole[prompt] for prompt in setup.config.preview_prompt)


def _stored(
    setup: Setup, store: FeatureCache, line: Mapping[str, Any]
) -> StoredPreview | None:
    """One preview with its values; None if what is trained now needs values that are
    not there.
    """
    task = generate_task(setup.spec, NEGATIVE in line["sides"])
    plan = make_plan(
        setup.spec, frozenset(line["inputs"]), task, setup.trainables.components
    )
    forms = line["values"]
    if any(
        name not in forms or forms[name].get("at", "") not in {"", *store.where}
        for name in plan.cached_values
    ):
        return None
    read = {
        name: store.read(form["at"]) if "at" in form else deserialize(form, {})
        for name, form in forms.items()
    }
    return StoredPreview(line["prompt"], plan, Sampling(**line["sampling"]), read)


def _plan_preview(setup: Setup, shared: Mapping[str, Any], prompt: str) -> PreviewPlan:
    spec = setup.spec
    call = plan_inference(spec, {**shared, "prompt": prompt})
    task = generate_task(spec, NEGATIVE in call.plan.branches)
    plan = make_plan(spec, frozenset(call.inputs), task, setup.trainables.components)
    cells = {name: _cell(name, call.inputs[name], setup) for name in plan.used_inputs}
    return PreviewPlan(prompt, plan, call.sampling, cells)


def _cell(name: str, value: Any, setup: Setup) -> Cell:
    """Return an input as a dataset would give it, so that both have one key."""
    return (
        value
        if isinstance(value, Cell)
        else Cell(as_column(name, setup.spec.inputs[name]).kind, value)
    )


def _arguments(setup: Setup) -> dict[str, Any]:
    """Return what all previews have in common: sizes, and what only a row can give,
    such as a image to be edited.
    """
    spec, task = setup.spec, setup.task
    given = setup.all_inputs() | (set(spec.defaults) & set(spec.inputs))
    used = make_plan(
        spec, frozenset(given), generate_task(spec, guided=False)
    ).used_inputs
    others = {*spec.defaults, *spec.cfg_inputs, *spec.cfg_inputs.values()}
    from_row = {
        n for n in used if isinstance(spec.inputs[n], Column) and n not in others
    }
    sizes = {
        name: source
        for name in sorted(used)
        if isinstance(source := spec.inputs[name], Measured)
    }
    arguments: dict[str, Any] = {}
    if from_row:
        cells = _first_row_with(setup, from_row)
        arguments |= {
            name: cell
            for name, cell in cells.items()
            if name in from_row or name in sizes
        }
    else:
        arguments |= _sizes(setup, sizes)
    if task.runs_sampler:  # the number of steps is what is trained, without guidance
        copy_if_shared = {
            name: cell.literal
            for name, cell in setup.dataset.rows[0].items()
            if name in RECORDED
        }
        arguments |= {**copy_if_shared, "guidance_scale": 1.0}
    return arguments


def _first_row_with(setup: Setup, wanted: set[str]) -> Mapping[str, Cell]:
    """Return the first sample that has most of these inputs, its images as small as
    previews are.
    """
    dataset = setup.dataset
    sample = max(
        range(len(dataset.rows)),
        key=lambda number: len(wanted & dataset.rows[number].keys()),
    )
    row, chunk = dataset.sample_ids[sample]
    table = replace(
        dataset.table,
        rows=(dataset.table.rows[row],),
        lines=(dataset.table.lines[row],),
    )
    config = replace(setup.data_config, resolution=_resolution(setup))
    return check_rows(table, config, setup.spec.inputs).rows[chunk]


def _sizes(setup: Setup, sizes: Mapping[str, Measured]) -> dict[str, int]:
    """--height, --width and --num_frames as far as inference reads them, else the
    variant's size at most PIXELS.
    """
    spec, defaults = setup.spec, setup.spec.defaults
    names: dict[str, str] = {
        source.axis: name for name, source in sizes.items() if name in defaults
    }
    found = {}
    if {"height", "width"} <= set(names):
        measured = spec.inputs[sizes[names["height"]].of]
        multiple = measured.multiple if isinstance(measured, Column) else 0
        size = (defaults[names["height"]], defaults[names["width"]])
        found["height"], found["width"] = fit(size, _resolution(setup), multiple)
    if "frames" in names:
        found["frames"] = setup.config.num_frames
    return {names[axis]: number for axis, number in found.items()}


def _resolution(setup: Setup) -> Resolution:
    return replace(
        setup.resolution, max_pixels=min(setup.resolution.max_pixels, PIXELS)
    )
