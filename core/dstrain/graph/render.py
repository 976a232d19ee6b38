"""A plan in words (text) and as data (JSON)."""

from collections.abc import Iterable
from typing import Any

from dstrain.graph.plan import Plan, Step
from dstrain.graph.spec import GIVEN_TO_HOLD, GIVEN_TO_MODEL_FN, Wiring
from dstrain.graph.task import Task
from dstrain.graph.unit import AMBIENT, Signature


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data, in a stable order."""
    return {
        "family": plan.family,
        "variant": plan.variant,
        "task": plan.task,
        "sides": list(plan.sides),
        "inputs": sorted(plan.inputs),
        "trainables": list(plan.trainables),
        "data_process": [_step(step) for step in plan.frozen],
        "train": [_step(step) for step in plan.live],
        "crossing": {key: plan.crossing_kinds[key] for key in plan.crossing},
        "components": {
            stage or "unsplit": list(names) for stage, names in plan.components.items()
        },
        "configs": {
            stage or "unsplit": list(names) for stage, names in plan.configs.items()
        },
        "skipped": dict(plan.skipped),
        "idle": list(plan.idle),
    }


def as_text(plan: Plan, wiring: Wiring, task: Task) -> str:
    """The plan as a page of text: what each stage loads and runs, what crosses between
    them, what does not run.
    """
    sides = f", sides {' and '.join(plan.sides)}" if len(plan.sides) > 1 else ""
    lines = [
        f"{plan.family} {plan.variant}, task {plan.task}, trains {', '.join(plan.trainables) or 'nothing'}{sides}"
    ]
    lines += [
        "",
        f"stage 1  {plan.task}:data_process   loads {_loaded(plan, 'data_process')}",
    ]
    lines += _rows(plan.frozen) or ["    (nothing to do)"]
    lines += ["", "    stored between the stages"]
    width = max((len(key) for key in plan.crossing), default=0)
    lines += [
        f"    = {key:{width}}  {plan.crossing_kinds[key]}" for key in plan.crossing
    ]
    lines += ["", f"stage 2  {plan.task}:train   loads {_loaded(plan, 'train')}"]
    lines += _rows(plan.live)
    lines.append(_reader(plan, wiring.model_fn, GIVEN_TO_MODEL_FN, wiring))
    if wiring.hold is not None:
        lines.append(_reader(plan, wiring.hold, GIVEN_TO_HOLD, wiring))
    lines += [
        f"    {task.loss.name}({', '.join(['predict', *task.loss.reads])}) -> loss"
    ]
    if plan.skipped or plan.idle:
        lines += ["", "not run"]
        lines += [f"    {name}: {reason}" for name, reason in plan.skipped.items()]
        lines += [f"    {name}: nothing needs it" for name in plan.idle]
    return "\n".join(lines) + "\n"


def _step(step: Step) -> dict[str, Any]:
    return {
        "unit": step.unit.name,
        "version": step.unit.version,
        "side": step.side,
        "reads": dict(step.reads),
        "makes": dict(step.makes),
        "borrows": list(step.unit.borrows),
    }


def _rows(steps: Iterable[Step]) -> list[str]:
    rows = []
    for step in steps:
        uses = [name for name in step.unit.borrows if name not in AMBIENT]
        tail = f"   uses {', '.join(uses)}" if uses else ""
        rows.append(
            f"    {step.unit.name}({', '.join(step.reads.values())}) -> {', '.join(step.makes.values())}{tail}"
        )
    return rows


def _loaded(plan: Plan, stage: str) -> str:
    configs = [f"{name} (configuration only)" for name in plan.configs[stage]]
    return ", ".join([*plan.components[stage], *configs]) or "nothing"


def _reader(
    plan: Plan, reader: Signature, given: tuple[str, ...], wiring: Wiring
) -> str:
    """A line for model_fn or hold: what it reads of what is there, and the components
    (an expert's part by name).
    """
    reads = [
        name
        for name in reader.reads
        if name in plan.crossing or any(name in step.makes for step in plan.live)
    ]
    expert = wiring.expert
    parts = (
        [part for part in expert.components if part in plan.components["train"]]
        if expert
        else []
    )
    uses = [
        " or ".join(parts) if expert and name == expert.role else name
        for name in reader.borrows
        if name not in AMBIENT
    ]
    return f"    {reader.name}({', '.join([*given, *reads])})" + (
        f"   uses {', '.join(uses)}" if uses else ""
    )
