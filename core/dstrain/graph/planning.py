"""Plan a task for given inputs, and refuse what it lacks."""

from collections.abc import Iterator

from dstrain.errors import UsageError, nearest
from dstrain.graph.function_spec import LOSS_CONTEXT, NEGATIVE
from dstrain.graph.inputs import Column
from dstrain.graph.plan import Plan
from dstrain.graph.spec import PipelineSpec, check_components
from dstrain.graph.unit import Task


def make_plan(
    spec: PipelineSpec,
    inputs: frozenset[str],
    task: Task,
    trainables: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> Plan:
    """Plan a task for the inputs that a row or a caller gives; a dotted name in
    `trainables` counts as its component, and errors suggest one of `columns`.

    Raises UsageError when the task needs an input that is absent, or does not use a
    component that is trained.
    """
    spec = spec.with_task_inputs(task)
    check_components(spec, task.loss, LOSS_CONTEXT)
    inputs |= frozenset(spec.constants)
    trained = tuple(dict.fromkeys(name.partition(".")[0] for name in trainables))
    plan = Plan(spec, task, inputs, trained)
    _check(plan, columns)
    return plan


def _check(plan: Plan, columns: tuple[str, ...]) -> None:
    """Refuse what the task lacks; see `make_plan`."""
    where = plan.spec.where
    missing = [
        (reader, name)
        for reader in plan.readers
        for name in reader.required
        if name not in plan.available
    ]
    if missing:
        reader, name = missing[0]
        roots = {root for _, one in missing for root in _roots(plan, one)}
        absent = [_named_input(plan, root, columns) for root in sorted(roots)]
        what = f"{reader.name} needs {name}, and there is no {' and no '.join(absent)}"
        unit = plan.spec.makers.get(name)
        if unit is None:
            source = plan.spec.inputs.get(name)
            advice = source.advice if isinstance(source, Column) else ""
            raise UsageError(where, what, *([advice] if advice else []))
        why = f"is skipped ({plan.skipped[unit.name]})"
        raise UsageError(where, what, f"unit {unit.name}, which computes it, {why}")
    required = {name for unit in plan.units for name in unit.required}
    for name, other in plan.spec.cfg_inputs.items():
        needed = NEGATIVE in plan.task.branches and name in required
        if needed and other not in plan.available:
            what = f"task {plan.task.name} needs the negative branch, and input {other!r} is absent"
            raise UsageError(where, what)
    in_training = plan.components["train"]
    for name in plan.trainables:
        if name not in in_training:
            what = f"cannot train {name!r}: task {plan.task.name} does not use it"
            used_here = f"used in a training step: {', '.join(in_training)}"
            raise UsageError(where, what, used_here)


def _roots(plan: Plan, name: str) -> Iterator[str]:
    """Yield the absent inputs without which a value cannot be computed."""
    unit = plan.spec.makers.get(name)
    if unit is None:
        yield name
        return
    for required in unit.required:
        if required not in plan.available:
            yield from _roots(plan, required)


def _named_input(plan: Plan, name: str, columns: tuple[str, ...]) -> str:
    source = plan.spec.inputs.get(name)
    from_table = plan.task.from_rows or columns
    if not from_table or not isinstance(source, Column):
        return f"input {name!r}"
    return f"column {source.name!r} (input {name}){nearest(source.name, columns)}"
