"""The plan: before any weight is loaded, which units run in which stage, what each
stage loads and what crosses.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Setting, Size
from dstrain.graph.spec import Wiring, check_borrows
from dstrain.graph.task import Task
from dstrain.graph.unit import LENT_TO_LOSS, Signature, Unit, component_of

POSITIVE = "positive"
KINDS_OF_COLUMNS = MappingProxyType(
    {
        "text": "str",
        "texts": "list[str]",
        "integer": "int",
        "number": "float",
        "picture": "picture",
        "pictures": "list[picture]",
        "frames": "frames",
    }
)


def side_name(name: str, side: str) -> str:
    """The key of a per-side value: plain for the positive side, 'negative.prompt_emb'
    for another.
    """
    return name if side == POSITIVE else f"{side}.{name}"


@dataclass(frozen=True)
class Step:
    """One run of a unit: `side` is '' for a unit that runs once for all sides.

    reads and makes map the unit's own names to keys in the table of values.
    """

    unit: Unit
    side: str
    reads: Mapping[str, str]
    makes: Mapping[str, str]


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
    sides: tuple[str, ...]
    inputs: frozenset[str]
    trainables: tuple[str, ...]
    frozen: tuple[Step, ...]
    live: tuple[Step, ...]
    in_step: tuple[str, ...]
    crossing: tuple[str, ...]
    crossing_kinds: Mapping[str, str]
    components: Mapping[str, tuple[str, ...]]
    configs: Mapping[str, tuple[str, ...]]
    skipped: Mapping[str, str]
    idle: tuple[str, ...]
    used_inputs: frozenset[str]


def make_plan(
    wiring: Wiring,
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
    check_borrows(task.loss, wiring, f"task {task.name}", LENT_TO_LOSS)
    wiring = wiring.joined(task)
    inputs = inputs | frozenset(wiring.settings)
    trained = _trained(wiring, trainables)
    skipped, available = _skips(wiring, inputs)
    readers = _readers(wiring, task)
    _refuse_missing(
        wiring,
        readers,
        available,
        skipped,
        columns if task.from_rows or columns else None,
    )
    needed = _needed(wiring, readers, available, skipped)
    _refuse_missing_side(wiring, needed, task, inputs)
    live = _live(wiring, needed, trained)
    steps = {
        unit.name: tuple(_spread(wiring, unit, task.sides, available))
        for unit in needed
    }
    frozen_steps = tuple(
        step for unit in needed if unit.name not in live for step in steps[unit.name]
    )
    live_steps = tuple(
        step for unit in needed if unit.name in live for step in steps[unit.name]
    )
    made_live = {key for step in live_steps for key in step.makes.values()}
    in_step = tuple(dict.fromkeys(_reader_keys(wiring, readers, task.sides, available)))
    crossing = tuple(
        sorted(
            {*in_step, *(key for step in live_steps for key in step.reads.values())}
            - made_live
        )
    )
    components, configs = _loads(
        wiring,
        frozen_steps,
        live_steps,
        readers,
        trained,
        whole=task.runs_sampler or not task.from_rows,
    )
    used = {
        key for step in (*frozen_steps, *live_steps) for key in step.reads.values()
    } | set(crossing)
    return Plan(
        family=wiring.family,
        variant=wiring.variant,
        task=task.name,
        sides=task.sides,
        inputs=inputs,
        trainables=trained,
        frozen=frozen_steps,
        live=live_steps,
        in_step=in_step,
        crossing=crossing,
        crossing_kinds=MappingProxyType({key: _kind(wiring, key) for key in crossing}),
        components=components,
        configs=configs,
        skipped=MappingProxyType(skipped),
        idle=tuple(
            u.name for u in wiring.units if u not in needed and u.name not in skipped
        ),
        used_inputs=frozenset(used & set(wiring.inputs)),
    )


def _trained(wiring: Wiring, trainables: tuple[str, ...]) -> tuple[str, ...]:
    trained = tuple(dict.fromkeys(name.partition(".")[0] for name in trainables))
    for name in trained:
        if name not in wiring.components:
            what = f"no component named {name!r} to train{nearest(name, wiring.components)}"
            raise UsageError(
                _named(wiring), what, f"components: {', '.join(wiring.components)}"
            )
    return trained


def _skips(wiring: Wiring, inputs: frozenset[str]) -> tuple[dict[str, str], set[str]]:
    """Walk the units in order: one whose required read is absent is skipped, so is
    whoever requires what it makes.
    """
    skipped: dict[str, str] = {}
    available = set(inputs)
    makers = wiring.makers
    for unit in wiring.units:
        absent = [name for name in unit.required if name not in available]
        if absent:
            causes = [
                f"{n} (unit {makers[n].name} is skipped)" if n in makers else n
                for n in absent
            ]
            skipped[unit.name] = "absent: " + ", ".join(causes)
        else:
            available |= set(unit.makes)
    return skipped, available


def _readers(wiring: Wiring, task: Task) -> tuple[Signature, ...]:
    return (wiring.model_fn, *([wiring.hold] if wiring.hold else []), task.loss)


def _refuse_missing(
    wiring: Wiring,
    readers: Iterable[Signature],
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
            {root for _, one in missing for root in _roots(wiring, one, available)}
        )
        words = " and no ".join(_column(wiring, root, columns) for root in roots)
        what = f"{reader.name} needs {name}, and there is no {words}"
        raise UsageError(_named(wiring), what, *_why(wiring, name, skipped))


def _refuse_missing_side(
    wiring: Wiring, needed: Iterable[Unit], task: Task, inputs: frozenset[str]
) -> None:
    """Refuse a task that asks for the negative side when the input of that side is
    absent.
    """
    for unit in needed:
        for name in unit.required:
            other = wiring.per_side.get(name)
            if other is not None and "negative" in task.sides and other not in inputs:
                raise UsageError(
                    _named(wiring),
                    f"task {task.name} needs the negative side, and input {other!r} is absent",
                )


def _why(wiring: Wiring, name: str, skipped: Mapping[str, str]) -> list[str]:
    unit = wiring.makers.get(name)
    return (
        [f"unit {unit.name}, which makes it, is skipped ({skipped[unit.name]})"]
        if unit
        else []
    )


def _roots(wiring: Wiring, name: str, available: set[str]) -> Iterator[str]:
    """The absent inputs that keep a value from being made."""
    unit = wiring.makers.get(name)
    if unit is None:
        yield name
        return
    for read in unit.required:
        if read not in available:
            yield from _roots(wiring, read, available)


def _column(wiring: Wiring, name: str, columns: tuple[str, ...] | None) -> str:
    source = wiring.inputs.get(name)
    if columns is None or not isinstance(source, Column):
        return f"input {name!r}"
    return f"column {source.name!r} (input {name}){nearest(source.name, columns)}"


def _needed(
    wiring: Wiring,
    readers: Iterable[Signature],
    available: set[str],
    skipped: Mapping[str, str],
) -> list[Unit]:
    wanted = {name for reader in readers for name in reader.reads if name in available}
    needed: list[Unit] = []
    for unit in reversed(wiring.units):
        if unit.name not in skipped and wanted & set(unit.makes):
            needed.insert(0, unit)
            wanted |= {name for name in unit.reads if name in available}
    return needed


def _live(wiring: Wiring, needed: Iterable[Unit], trained: tuple[str, ...]) -> set[str]:
    """Units that borrow `rng` or what is trained (a role: any of its experts), or read
    what such units make.
    """
    roots = set(trained)
    if wiring.expert is not None and roots & set(wiring.expert.components):
        roots.add(wiring.expert.role)
    live: set[str] = set()
    made: set[str] = set()
    for unit in needed:
        if "rng" in unit.borrows or roots & set(unit.borrows) or made & set(unit.reads):
            live.add(unit.name)
            made |= set(unit.makes)
    return live


def _spread(
    wiring: Wiring, unit: Unit, sides: tuple[str, ...], available: set[str]
) -> Iterator[Step]:
    """Yield the unit once, or once per side if it reads anything per-side or borrows
    `side`.
    """
    sided = wiring.sided
    per_side = bool(set(unit.makes) & sided)
    for side in sides if per_side else ("",):
        reads = {
            name: value_key(wiring, name, side)
            for name in unit.reads
            if _has(wiring, name, side, available)
        }
        yield Step(
            unit,
            side,
            MappingProxyType(reads),
            MappingProxyType(
                {name: side_name(name, side or POSITIVE) for name in unit.makes}
            ),
        )


def value_key(wiring: Wiring, name: str, side: str) -> str:
    """The key under which a side finds a value: 'negative_prompt',
    'negative.prompt_emb'; plain if shared.
    """
    if side in ("", POSITIVE) or name not in wiring.sided:
        return name
    if name in wiring.per_side:
        return wiring.per_side[name] if side == "negative" else side_name(name, side)
    return side_name(name, side)


def _has(wiring: Wiring, name: str, side: str, available: set[str]) -> bool:
    """Whether a side finds a value: for the negative side of an input, whether that
    side's own input is there.
    """
    other = wiring.per_side.get(name) if side == "negative" else None
    return name in available and (other is None or other in available)


def _reader_keys(
    wiring: Wiring,
    readers: tuple[Signature, ...],
    sides: tuple[str, ...],
    available: set[str],
) -> list[str]:
    """Keys that model_fn reads for every side, and the others for the positive one."""
    reads = readers[0].reads
    keys = [
        value_key(wiring, name, side)
        for side in sides
        for name in reads
        if _has(wiring, name, side, available)
    ]
    return keys + [
        name for reader in readers[1:] for name in reader.reads if name in available
    ]


def _loads(
    wiring: Wiring,
    frozen: Iterable[Step],
    live: Iterable[Step],
    readers: tuple[Signature, ...],
    trained: tuple[str, ...],
    whole: bool,
) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    """Components, and configurations alone, per stage ('': one piece).

    An expert's role is what is trained of it, or all its parts: those of a loss that
    needs it whole.
    """
    in_step: list[Signature] = [*(step.unit for step in live), *readers]
    by_stage: dict[str, list[Signature]] = {
        "data_process": [step.unit for step in frozen],
        "train": in_step,
    }
    by_stage[""] = by_stage["data_process"] + in_step
    components: dict[str, tuple[str, ...]] = {}
    configs: dict[str, tuple[str, ...]] = {}
    for stage, users in by_stage.items():
        names = [
            name for user in users for name in user.borrows if name not in LENT_TO_LOSS
        ]
        names = [
            part
            for name in names
            for part in _parts(wiring, name, () if whole else trained)
        ]
        full = {name for name in names if name in wiring.components}
        components[stage] = tuple(name for name in wiring.components if name in full)
        bare = {
            component_of(name) for name in names if name not in wiring.components
        } - full
        configs[stage] = tuple(name for name in wiring.components if name in bare)
    unused = [name for name in trained if name not in components["train"]]
    if unused:
        what = f"{unused[0]} is to be trained, but nothing the task needs uses it"
        raise UsageError(
            _named(wiring),
            what,
            f"used in a training step: {', '.join(components['train'])}",
        )
    return MappingProxyType(components), MappingProxyType(configs)


def _parts(wiring: Wiring, name: str, trained: tuple[str, ...]) -> tuple[str, ...]:
    expert = wiring.expert
    if expert is None or component_of(name) != expert.role:
        return (name,)
    suffix = name.removeprefix(expert.role)
    chosen = [part for part in expert.components if part in trained] or list(
        expert.components
    )
    return tuple(part + suffix for part in chosen)


def _kind(wiring: Wiring, key: str) -> str:
    name = key.rpartition(".")[2]
    if name in wiring.makers:
        return wiring.makers[name].makes[name]
    source = wiring.inputs[name]
    if isinstance(source, Column | Setting):
        return KINDS_OF_COLUMNS[source.kind]
    return "int" if isinstance(source, Size) else "as given"


def _named(wiring: Wiring) -> str:
    return f"{wiring.family} {wiring.variant}"
