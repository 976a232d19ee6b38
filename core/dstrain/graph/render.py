"""A plan in words (text) and as data (JSON)."""

from collections.abc import Iterable
from typing import Any

from dstrain.graph.plan import Plan, Step
from dstrain.graph.spec import (
    GIVEN_TO_CONSTRAIN_LATENTS,
    GIVEN_TO_MODEL_FN,
    PipelineSpec,
)
from dstrain.graph.task import Task
from dstrain.graph.unit import CONTEXT, FunctionSpec


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data, in a stable order."""
    return {
        "family": plan.family,
        "variant": plan.variant,
        "task": plan.task,
        "branches": list(plan.branches),
        "inputs": sorted(plan.inputs),
        "trainables": list(plan.trainables),
        "data_process": [_step(step) for step in plan.cached_steps],
        "train": [_step(step) for step in plan.train_steps],
        "cached_values": {key: plan.cached_kinds[key] for key in plan.cached_values},
        "components": {
            stage or "unsplit": list(names) for stage, names in plan.components.items()
        },
        "configs": {
            stage or "unsplit": list(names) for stage, names in plan.configs.items()
        },
        "skipped": dict(plan.skipped),
        "idle": list(plan.unused_units),
    }


def as_text(plan: Plan, spec: PipelineSpec, task: Task) -> str:
    """The plan as a page of text: what each stage loads and runs, what crosses between
    them, what does not run.
    """
    branches = (
        f", branches {' and '.join(plan.branches)}" if len(plan.branches) > 1 else ""
    )
    lines = [
        f"{plan.family} {plan.variant}, task {plan.task}, trains {', '.join(plan.trainables) or 'nothing'}{branches}"
    ]
    lines += [
        "",
        f"stage 1  {plan.task}:data_process   loads {_loaded(plan, 'data_process')}",
    ]
    lines += _rows(plan.cached_steps) or ["    (nothing to do)"]
    lines += ["", "    stored between the stages"]
    width = max((len(key) for key in plan.cached_values), default=0)
    lines += [
        f"    = {key:{width}}  {plan.cached_kinds[key]}" for key in plan.cached_values
    ]
    lines += ["", f"stage 2  {plan.task}:train   loads {_loaded(plan, 'train')}"]
    lines += _rows(plan.train_steps)
    lines.append(_reader(plan, spec.model_fn, GIVEN_TO_MODEL_FN, spec))
    if spec.constrain_latents is not None:
        lines.append(
            _reader(plan, spec.constrain_latents, GIVEN_TO_CONSTRAIN_LATENTS, spec)
        )
    lines += [
        f"    {task.loss.name}({', '.join(['predict', *task.loss.inputs])}) -> loss"
    ]
    if plan.skipped or plan.unused_units:
        lines += ["", "not run"]
        lines += [f"    {name}: {reason}" for name, reason in plan.skipped.items()]
        lines += [f"    {name}: nothing needs it" for name in plan.unused_units]
    return "\n".join(lines) + "\n"


def _step(step: Step) -> dict[str, Any]:
    return {
        "unit": step.unit.name,
        "version": step.unit.version,
        "branch": step.branch,
        "inputs": dict(step.inputs),
        "outputs": dict(step.outputs),
        "components": list(step.unit.components),
    }


def _rows(steps: Iterable[Step]) -> list[str]:
    rows = []
    for step in steps:
        uses = [name for name in step.unit.components if name not in CONTEXT]
        tail = f"   uses {', '.join(uses)}" if uses else ""
        rows.append(
            f"    {step.unit.name}({', '.join(step.inputs.values())}) -> {', '.join(step.outputs.values())}{tail}"
        )
    return rows


def _loaded(plan: Plan, stage: str) -> str:
    configs = [f"{name} (configuration only)" for name in plan.configs[stage]]
    return ", ".join([*plan.components[stage], *configs]) or "nothing"


def _reader(
    plan: Plan, reader: FunctionSpec, given: tuple[str, ...], spec: PipelineSpec
) -> str:
    """A line for model_fn or hold: what it reads of what is there, and the components
    (an expert's part by name).
    """
    reads = [
        name
        for name in reader.inputs
        if name in plan.cached_values
        or any(name in step.outputs for step in plan.train_steps)
    ]
    experts = spec.experts
    parts = (
        [part for part in experts.components if part in plan.components["train"]]
        if experts
        else []
    )
    uses = [
        " or ".join(parts) if experts and name == experts.denoiser else name
        for name in reader.components
        if name not in CONTEXT
    ]
    return f"    {reader.name}({', '.join([*given, *reads])})" + (
        f"   uses {', '.join(uses)}" if uses else ""
    )
