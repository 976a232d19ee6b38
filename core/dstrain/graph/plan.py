"""The plan: before any weight is loaded, which units run in which stage, what each
stage loads and what crosses.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Constant, Measured
from dstrain.graph.spec import PipelineSpec, check_borrows
from dstrain.graph.task import Task
from dstrain.graph.unit import LOSS_CONTEXT, FunctionSpec, Unit, component_of

POSITIVE = "positive"
KINDS_OF_COLUMNS = MappingProxyType(
    {
        "text": "str",
        "texts": "list[str]",
        "integer": "int",
        "number": "float",
        "image": "image",
        "images": "list[image]",
        "video": "video",
    }
)


def branch_key(name: str, branch: str) -> str:
    """The key of a per-side value: plain for the positive side, 'negative.prompt_emb'
    for another.
    """
    return name if branch == POSITIVE else f"{branch}.{name}"


@dataclass(frozen=True)
class Step:
    """One run of a unit: `side` is '' for a unit that runs once for all sides.

    reads and makes map the unit's own names to keys in the table of values.
    """

    unit: Unit
    branch: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """Pure data. `frozen` is stage 1 (data_process), `live` is stage 2 (train) before
    model_fn and loss.

    in_step: keys that model_fn, hold and the loss read. crossing: keys of the values
    stored between the stages. components: stage -> components loaded; configs: stage ->
    components of which only the configuration is read. skipped: unit -> reason; idle:
    units nothing needs.
    """

    family: str
    variant: str
    task: str
    branches: tuple[str, ...]
    inputs: frozenset[str]
    trainables: tuple[str, ...]
    cached_steps: tuple[Step, ...]
    train_steps: tuple[Step, ...]
    loss_inputs: tuple[str, ...]
    cached_values: tuple[str, ...]
    cached_kinds: Mapping[str, str]
    components: Mapping[str, tuple[str, ...]]
    configs: Mapping[str, tuple[str, ...]]
    skipped: Mapping[str, str]
    unused_units: tuple[str, ...]
    used_inputs: frozenset[str]


def make_plan(
    spec: PipelineSpec,
    inputs: frozenset[str],
    task: Task,
    trainables: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> Plan:
    """Plan a task for the inputs present; trainables are component names, dotted ones
    count as their component.

    columns: the data set's, to name the nearest one when an input is missing. Raises
    UsageError when the task needs an input that is absent, or trains what no needed
    unit uses.
    """
    check_borrows(task.loss, spec, f"task {task.name}", LOSS_CONTEXT)
    spec = spec.with_task_inputs(task)
    inputs = inputs | frozenset(spec.settings)
    trained = _trained(spec, trainables)
    skipped, available = _skips(spec, inputs)
    readers = _readers(spec, task)
    _refuse_missing(
        spec,
        readers,
        available,
        skipped,
        columns if task.from_rows or columns else None,
    )
    needed = _needed(spec, readers, available, skipped)
    _refuse_missing_side(spec, needed, task, inputs)
    live = _live(spec, needed, trained)
    steps = {
        unit.name: tuple(_spread(spec, unit, task.branches, available))
        for unit in needed
    }
    cached_steps = tuple(
        step for unit in needed if unit.name not in live for step in steps[unit.name]
    )
    train_steps = tuple(
        step for unit in needed if unit.name in live for step in steps[unit.name]
    )
    made_live = {key for step in train_steps for key in step.outputs.values()}
    loss_inputs = tuple(
        dict.fromkeys(_reader_keys(spec, readers, task.branches, available))
    )
    cached_values = tuple(
        sorted(
            {
                *loss_inputs,
                *(key for step in train_steps for key in step.inputs.values()),
            }
            - made_live
        )
    )
    components, configs = _loads(
        spec,
        cached_steps,
        train_steps,
        readers,
        trained,
        whole=task.runs_sampler or not task.from_rows,
    )
    used = {
        key for step in (*cached_steps, *train_steps) for key in step.inputs.values()
    } | set(cached_values)
    return Plan(
        family=spec.family,
        variant=spec.variant,
        task=task.name,
        branches=task.branches,
        inputs=inputs,
        trainables=trained,
        cached_steps=cached_steps,
        train_steps=train_steps,
        loss_inputs=loss_inputs,
        cached_values=cached_values,
        cached_kinds=MappingProxyType({key: _kind(spec, key) for key in cached_values}),
        components=components,
        configs=configs,
        skipped=MappingProxyType(skipped),
        unused_units=tuple(
            u.name for u in spec.units if u not in needed and u.name not in skipped
        ),
        used_inputs=frozenset(used & set(spec.inputs)),
    )


def _trained(spec: PipelineSpec, trainables: tuple[str, ...]) -> tuple[str, ...]:
    trained = tuple(dict.fromkeys(name.partition(".")[0] for name in trainables))
    for name in trained:
        if name not in spec.components:
            what = (
                f"no component named {name!r} to train{nearest(name, spec.components)}"
            )
            raise UsageError(
                _named(spec), what, f"components: {', '.join(spec.components)}"
            )
    return trained


def _skips(
    spec: PipelineSpec, inputs: frozenset[str]
) -> tuple[dict[str, str], set[str]]:
    """Walk the units in order: one whose required read is absent is skipped, so is
    whoever requires what it makes.
    """
    skipped: dict[str, str] = {}
    available = set(inputs)
    makers = spec.makers
    for unit in spec.units:
        absent = [name for name in unit.required if name not in available]
        if absent:
            causes = [
                f"{n} (unit {makers[n].name} is skipped)" if n in makers else n
                for n in absent
            ]
            skipped[unit.name] = "absent: " + ", ".join(causes)
        else:
            available |= set(unit.outputs)
    return skipped, available


def _readers(spec: PipelineSpec, task: Task) -> tuple[FunctionSpec, ...]:
    return (
        spec.model_fn,
        *([spec.constrain_latents] if spec.constrain_latents else []),
        task.loss,
    )


def _refuse_missing(
    spec: PipelineSpec,
    readers: Iterable[FunctionSpec],
    available: set[str],
    skipped: Mapping[str, str],
    columns: tuple[str, ...] | None,
) -> None:
    """Refuse a plan that lacks what model_fn, hold or the loss requires; columns: None
    where a caller gives inputs.
    """
    missing = [
        (reader, name)
        for reader in readers
        for name in reader.required
        if name not in available
    ]
    if missing:
        reader, name = missing[0]
        roots = sorted(
            {root for _, one in missing for root in _roots(spec, one, available)}
        )
        words = " and no ".join(_column(spec, root, columns) for root in roots)
        what = f"{reader.name} needs {name}, and there is no {words}"
        raise UsageError(_named(spec), what, *_why(spec, name, skipped))


def _refuse_missing_side(
    spec: PipelineSpec, needed: Iterable[Unit], task: Task, inputs: frozenset[str]
) -> None:
    """Refuse a task that asks for the negative side when the input of that side is
    absent.
    """
    for unit in needed:
        for name in unit.required:
            other = spec.cfg_inputs.get(name)
            if (
                other is not None
                and "negative" in task.branches
                and other not in inputs
            ):
                raise UsageError(
                    _named(spec),
                    f"task {task.name} needs the negative side, and input {other!r} is absent",
                )


def _why(spec: PipelineSpec, name: str, skipped: Mapping[str, str]) -> list[str]:
    unit = spec.makers.get(name)
    return (
        [f"unit {unit.name}, which makes it, is skipped ({skipped[unit.name]})"]
        if unit
        else []
    )


def _roots(spec: PipelineSpec, name: str, available: set[str]) -> Iterator[str]:
    """The absent inputs that keep a value from being made."""
    unit = spec.makers.get(name)
    if unit is None:
        yield name
        return
    for read in unit.required:
        if read not in available:
            yield from _roots(spec, read, available)


def _column(spec: PipelineSpec, name: str, columns: tuple[str, ...] | None) -> str:
    source = spec.inputs.get(name)
    if columns is None or not isinstance(source, Column):
        return f"input {name!r}"
    return f"column {source.name!r} (input {name}){nearest(source.name, columns)}"


def _needed(
    spec: PipelineSpec,
    readers: Iterable[FunctionSpec],
    available: set[str],
    skipped: Mapping[str, str],
) -> list[Unit]:
    wanted = {name for reader in readers for name in reader.inputs if name in available}
    needed: list[Unit] = []
    for unit in reversed(spec.units):
        if unit.name not in skipped and wanted & set(unit.outputs):
            needed.insert(0, unit)
            wanted |= {name for name in unit.inputs if name in available}
    return needed


def _live(
    spec: PipelineSpec, needed: Iterable[Unit], trained: tuple[str, ...]
) -> set[str]:
    """Units that borrow `rng` or what is trained (a role: any of its experts), or read
    what such units make.
    """
    roots = set(trained)
    if spec.experts is not None and roots & set(spec.experts.components):
        roots.add(spec.experts.denoiser)
    live: set[str] = set()
    made: set[str] = set()
    for unit in needed:
        if (
            "rng" in unit.components
            or roots & set(unit.components)
            or made & set(unit.inputs)
        ):
            live.add(unit.name)
            made |= set(unit.outputs)
    return live


def _spread(
    spec: PipelineSpec, unit: Unit, branches: tuple[str, ...], available: set[str]
) -> Iterator[Step]:
    """Yield the unit once, or once per side if it reads anything per-side or borrows
    `side`.
    """
    branched = spec.branched
    cfg_inputs = bool(set(unit.outputs) & branched)
    for branch in branches if cfg_inputs else ("",):
        reads = {
            name: value_key(spec, name, branch)
            for name in unit.inputs
            if _has(spec, name, branch, available)
        }
        yield Step(
            unit,
            branch,
            MappingProxyType(reads),
            MappingProxyType(
                {name: branch_key(name, branch or POSITIVE) for name in unit.outputs}
            ),
        )


def value_key(spec: PipelineSpec, name: str, branch: str) -> str:
    """The key under which a side finds a value: 'negative_prompt',
    'negative.prompt_emb'; plain if shared.
    """
    if branch in ("", POSITIVE) or name not in spec.branched:
        return name
    if name in spec.cfg_inputs:
        return (
            spec.cfg_inputs[name] if branch == "negative" else branch_key(name, branch)
        )
    return branch_key(name, branch)


def _has(spec: PipelineSpec, name: str, branch: str, available: set[str]) -> bool:
    """Whether a side finds a value: for the negative side of an input, whether that
    side's own input is there.
    """
    other = spec.cfg_inputs.get(name) if branch == "negative" else None
    return name in available and (other is None or other in available)


def _reader_keys(
    spec: PipelineSpec,
    readers: tuple[FunctionSpec, ...],
    branches: tuple[str, ...],
    available: set[str],
) -> list[str]:
    """Keys that model_fn reads for every side, and the others for the positive one."""
    reads = readers[0].inputs
    keys = [
        value_key(spec, name, branch)
        for branch in branches
        for name in reads
        if _has(spec, name, branch, available)
    ]
    return keys + [
        name for reader in readers[1:] for name in reader.inputs if name in available
    ]


def _loads(
    spec: PipelineSpec,
    frozen: Iterable[Step],
    live: Iterable[Step],
    readers: tuple[FunctionSpec, ...],
    trained: tuple[str, ...],
    whole: bool,
) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    """Components, and configurations alone, per stage ('': one piece).

    An expert's role is what is trained of it, or all its parts: those of a loss that
    needs it whole.
    """
    loss_inputs: list[FunctionSpec] = [*(step.unit for step in live), *readers]
    by_stage: dict[str, list[FunctionSpec]] = {
        "data_process": [step.unit for step in frozen],
        "train": loss_inputs,
    }
    by_stage[""] = by_stage["data_process"] + loss_inputs
    components: dict[str, tuple[str, ...]] = {}
    configs: dict[str, tuple[str, ...]] = {}
    for stage, users in by_stage.items():
        names = [
            name
            for user in users
            for name in user.components
            if name not in LOSS_CONTEXT
        ]
        names = [
            part
            for name in names
            for part in _parts(spec, name, () if whole else trained)
        ]
        full = {name for name in names if name in spec.components}
        components[stage] = tuple(name for name in spec.components if name in full)
        bare = {
            component_of(name) for name in names if name not in spec.components
        } - full
        configs[stage] = tuple(name for name in spec.components if name in bare)
    unused = [name for name in trained if name not in components["train"]]
    if unused:
        what = f"{unused[0]} is to be trained, but nothing the task needs uses it"
        raise UsageError(
            _named(spec),
            what,
            f"used in a training step: {', '.join(components['train'])}",
        )
    return MappingProxyType(components), MappingProxyType(configs)


def _parts(spec: PipelineSpec, name: str, trained: tuple[str, ...]) -> tuple[str, ...]:
    experts = spec.experts
    if experts is None or component_of(name) != experts.denoiser:
        return (name,)
    suffix = name.removeprefix(experts.denoiser)
    chosen = [part for part in experts.components if part in trained] or list(
        experts.components
    )
    return tuple(part + suffix for part in chosen)


def _kind(spec: PipelineSpec, key: str) -> str:
    name = key.rpartition(".")[2]
    if name in spec.makers:
        return spec.makers[name].outputs[name]
    source = spec.inputs[name]
    if isinstance(source, Column | Constant):
        return KINDS_OF_COLUMNS[source.kind]
    return "int" if isinstance(source, Measured) else "as given"


def _named(spec: PipelineSpec) -> str:
    return f"{spec.family} {spec.variant}"
