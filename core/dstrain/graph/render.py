"""Print a plan as text or as JSON data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dstrain.graph.function_spec import CONTEXT, FunctionSpec
from dstrain.graph.noise_process import constrain_nothing
from dstrain.graph.plan import Plan, Step
from dstrain.graph.spec import GIVEN_TO_CONSTRAIN_LATENTS, GIVEN_TO_MODEL_FN


def as_data(plan: Plan, kept: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the plan as JSON data; `kept` says how weights of components are kept."""
    return {
        "family": plan.spec.family,
        "variant": plan.spec.variant,
        "task": plan.task.name,
        "branches": plan.task.branches,
        "inputs": sorted(plan.inputs),
        "trainables": plan.trainables,
        "data_process": [_step(step) for step in plan.cached_steps],
        "train": [_step(step) for step in plan.train_steps],
        "cached_values": plan.cached_kinds,
        "components": _by_stage(plan.components),
        "configs": _by_stage(plan.configs),
        "kept": dict(kept or {}),
        "skipped": plan.skipped,
        "idle": plan.unused_units,
    }


def _by_stage(names: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {stage or "unsplit": components for stage, components in names.items()}


def as_text(
    plan: Plan, kept: Mapping[str, str] | None = None, is_split: bool = True
) -> str:
    """Return a page of text: what each stage loads and runs, or a run without stages,
    the values that are cached, the units that do not run, and how components are
    `kept`, in words.
    """
    spec = plan.spec
    task = plan.task.name
    trained = ", ".join(plan.trainables) or "nothing"
    title = f"{spec.family} {spec.variant}, task {task}, trains {trained}"
    if len(plan.task.branches) > 1:
        title += f", branches {' and '.join(plan.task.branches)}"
    loads = _loaded(plan, "data_process")
    first, second = (f"stage 1  {task}:data_process", f"stage 2  {task}:train")
    between = "stored between the stages"
    if not is_split:
        first, second = "each step, first", "each step, then"
        between = "what --feature_cache would store, to compute it once"
    lines = [title, "", f"{first}   loads {loads}"]
    lines += _rows(plan.cached_steps) or ["    (nothing to do)"]
    lines += ["", f"    {between}"]
    width = max(map(len, plan.cached_values), default=0)
    for key, kind in plan.cached_kinds.items():
        lines.append(f"    = {key:{width}}  {kind}")
    lines += ["", f"{second}   loads {_loaded(plan, 'train')}"]
    lines += _rows(plan.train_steps)
    lines.append(_reader(plan, spec.model_fn, GIVEN_TO_MODEL_FN))
    constraint = spec.constrain_latents
    if constraint.function is not constrain_nothing:
        lines.append(_reader(plan, constraint, GIVEN_TO_CONSTRAIN_LATENTS))
    loss = plan.task.loss
    used = [name for name in loss.inputs if name in plan.available]
    arguments = ", ".join(["predict", *used])
    predicts = spec.schedule.predicts
    of = "" if predicts == "velocity" else f" of {predicts}"
    lines.append(f"    {loss.name}({arguments}) -> loss{of}")
    if plan.skipped or plan.unused_units:
        lines += ["", "not run"]
        lines += [f"    {name}: {reason}" for name, reason in plan.skipped.items()]
        lines += [f"    {name}: nothing needs it" for name in plan.unused_units]
    if kept:
        width = max(map(len, kept))
        lines += ["", "how weights are kept"]
        lines += [f"    {name:{width}}  {words}" for name, words in kept.items()]
    return "\n".join(lines) + "\n"


def _step(step: Step) -> dict[str, Any]:
    return {
        "unit": step.unit.name,
        "version": step.unit.version,
        "branch": step.branch,
        "inputs": step.inputs,
        "outputs": step.outputs,
        "components": step.unit.components,
    }


def _rows(steps: Iterable[Step]) -> list[str]:
    rows = []
    for step in steps:
        uses = [name for name in step.unit.components if name not in CONTEXT]
        inputs = ", ".join(step.inputs.values())
        outputs = ", ".join(step.outputs.values())
        rows.append(f"    {step.unit.name}({inputs}) -> {outputs}{_uses(uses)}")
    return rows


def _uses(names: Sequence[str]) -> str:
    return f"   uses {', '.join(names)}" if names else ""


def _loaded(plan: Plan, stage: str) -> str:
    configs = [f"{name} (configuration only)" for name in plan.configs[stage]]
    return ", ".join([*plan.components[stage], *configs]) or "nothing"


def _reader(plan: Plan, function: FunctionSpec, given: tuple[str, ...]) -> str:
    """Return the line of model_fn or constrain_latents: the inputs that are present and
    the components, the denoiser by the names of its experts.
    """
    arguments = list(given)
    arguments += [name for name in function.inputs if name in plan.loss_inputs]
    experts = plan.spec.experts
    uses = []
    for name in function.components:
        if experts is not None and name in experts.roles:
            loaded = plan.components["train"]
            name = " or ".join(one for one in experts.roles[name] if one in loaded)
        if name not in CONTEXT:
            uses.append(name)
    values = ", ".join(arguments)
    return f"    {function.name}({values}){_uses(uses)}"
