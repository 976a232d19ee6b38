"""Plan a task before any weight is loaded: which units run in which stage, which
components each stage loads, and which values are cached between the stages.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from dstrain.errors import UsageError, nearest
from dstrain.graph.function_spec import (
    LOSS_CONTEXT,
    NEGATIVE,
    POSITIVE,
    FunctionSpec,
    component_of,
)
from dstrain.graph.inputs import Column
from dstrain.graph.spec import PipelineSpec, check_components
from dstrain.graph.task import Task
from dstrain.graph.unit import Unit

KINDS_OF_COLUMNS = MappingProxyType(
    {
        "text": "str",
        "texts": "list[str]",
        "integer": "int",
        "number": "float",
        "image": "image",
        "images": "list[image]",
        "video": "video",
        "tensors": "record",
    }
)


@dataclass(frozen=True)
class Step:
    """One run of a unit."""

    unit: Unit
    branch: str
    """Branch that it runs for; '' for a unit that runs once for all branches."""
    inputs: Mapping[str, str]
    """The unit's own name of an input -> its key in the table of values."""
    outputs: Mapping[str, str]
    """The unit's own name of an output -> its key in the table of values."""


def value_key(
    spec: PipelineSpec,
    name: str,
    branch: str,
) -> str:
    """Return the key under which a branch finds a value.

    It is 'negative_prompt' for an input, 'negative.prompt_emb' for another value of the
    negative branch, and the plain name for a value that all branches share.
    """
    if branch in ("", POSITIVE) or name not in spec.branched:
        return name
    if branch == NEGATIVE and name in spec.cfg_inputs:
        return spec.cfg_inputs[name]
    return f"{branch}.{name}"


@dataclass(frozen=True)
class Plan:
    """Which units run in which stage, and what each stage loads.

    All of it follows from the four fields; nothing is loaded.
    """

    spec: PipelineSpec
    """The variant, with the inputs of the task."""
    task: Task
    inputs: frozenset[str]
    """Inputs that are present, constants of the variant included."""
    trainables: tuple[str, ...]
    """Components that are trained."""

    @cached_property
    def available(self) -> frozenset[str]:
        """Return the names of the present inputs and of what can be computed from them."""
        return self.spec.find_available(self.inputs)[0]

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Return the units that lack an input, each with the reason."""
        return self.spec.find_available(self.inputs)[1]

    @property
    def readers(self) -> tuple[FunctionSpec, ...]:
        """Return the functions of a training step that follow the units."""
        return *self.spec.step_functions, self.task.loss

    @cached_property
    def units(self) -> list[Unit]:
        """Return the units whose outputs the training step uses, directly or not."""
        wanted = {name for reader in self.readers for name in reader.inputs}
        needed: list[Unit] = []
        # Backwards: a unit is needed if a later one is that uses its outputs.
        for unit in reversed(self.spec.units):
            if unit.name not in self.skipped and wanted & set(unit.outputs):
                needed.insert(0, unit)
                wanted |= set(unit.inputs)
        return needed

    @property
    def unused_units(self) -> list[str]:
        """Return the names of the units whose outputs nothing uses."""
        used = {unit.name for unit in self.units} | set(self.skipped)
        return [unit.name for unit in self.spec.units if unit.name not in used]

    @cached_property
    def cached_steps(self) -> tuple[Step, ...]:
        """Return the steps of stage 1 (data_process)."""
        in_training = self._units_in_training
        return tuple(step for step in self._steps if step.unit not in in_training)

    @cached_property
    def train_steps(self) -> tuple[Step, ...]:
        """Return the steps of stage 2 (train) before model_fn and the loss."""
        in_training = self._units_in_training
        return tuple(step for step in self._steps if step.unit in in_training)

    @cached_property
    def loss_inputs(self) -> tuple[str, ...]:
        """Return the keys of the values that model_fn uses for every branch, and
        constrain_latents and the loss for the positive one.
        """
        model_fn, *others = self.readers
        keys: list[str] = []
        for branch in self.task.branches:
            keys += self._inputs(model_fn, branch).values()
        for reader in others:
            keys += [name for name in reader.inputs if name in self.available]
        return tuple(dict.fromkeys(keys))

    @cached_property
    def cached_values(self) -> tuple[str, ...]:
        """Return the keys of the values that are stored between the stages: what training
        uses and does not compute itself.
        """
        used = set(self.loss_inputs)
        computed = set()
        for step in self.train_steps:
            used |= set(step.inputs.values())
            computed |= set(step.outputs.values())
        return tuple(sorted(used - computed))

    @property
    def cached_kinds(self) -> dict[str, str]:
        """Return the kind of each cached value, by its key."""
        kinds = {}
        for key in self.cached_values:
            name = key.rpartition(".")[2]
            if name in self.spec.makers:
                kinds[key] = self.spec.makers[name].outputs[name]
            else:
                kinds[key] = KINDS_OF_COLUMNS[self.spec.inputs[name].kind]
        return kinds

    @cached_property
    def components(self) -> dict[str, tuple[str, ...]]:
        """Return the components that each stage loads; stage '' is a run that is not split."""
        known = self.spec.components
        return {
            stage: tuple(name for name in known if name in used)
            for stage, used in self._used_components.items()
        }

    def components_of(self, steps: Iterable[Step]) -> frozenset[str]:
        """Return the components that some steps load."""
        used = {name for step in steps for name in self._components(step.unit)}
        return frozenset(name for name in self.spec.components if name in used)

    @cached_property
    def configs(self) -> dict[str, tuple[str, ...]]:
        """Return the components of which each stage reads only the configuration."""
        found = {}
        for stage, used in self._used_components.items():
            names = {component_of(name) for name in used} - used
            found[stage] = tuple(one for one in self.spec.components if one in names)
        return found

    @cached_property
    def used_inputs(self) -> frozenset[str]:
        """Return the inputs that a step uses, or that are cached."""
        used = set(self.cached_values)
        for step in (*self.cached_steps, *self.train_steps):
            used |= set(step.inputs.values())
        return frozenset(used & set(self.spec.inputs))

    @cached_property
    def _units_in_training(self) -> list[Unit]:
        """Return the units that must run in each training step.

        These are the units that use `rng` or a trained component, and the units that
        use their outputs.
        """
        changing = {"rng", *self.trainables}
        experts = self.spec.experts
        for role, components in experts.roles.items() if experts else ():
            if changing & set(components):
                changing.add(role)
        return _units_in_training(self.units, changing)

    @cached_property
    def _used_components(self) -> dict[str, set[str]]:
        """Return what each stage's functions ask for: components, or their `_config`."""
        first: list[FunctionSpec] = [step.unit for step in self.cached_steps]
        second = [*(step.unit for step in self.train_steps), *self.readers]
        stages = {"data_process": first, "train": second, "": [*first, *second]}
        return {
            stage: {name for one in functions for name in self._components(one)}
            for stage, functions in stages.items()
        }

    @cached_property
    def _steps(self) -> list[Step]:
        """Return the steps whose outputs the training step uses, directly or not.

        A unit that is needed for one branch is not run for the other as well.
        """
        wanted = set(self.loss_inputs)
        steps: list[Step] = []
        for step in reversed(list(self._steps_of(self.units))):
            if wanted & set(step.outputs.values()):
                steps.insert(0, step)
                wanted |= set(step.inputs.values())
        return steps

    def _steps_of(self, units: Iterable[Unit]) -> Iterator[Step]:
        """Yield each unit once, or once per branch if its outputs differ by branch."""
        for unit in units:
            by_branch = set(unit.outputs) & self.spec.branched
            for branch in self.task.branches if by_branch else ("",):
                inputs = self._inputs(unit, branch)
                outputs = {
                    name: value_key(self.spec, name, branch) for name in unit.outputs
                }
                yield Step(unit, branch, inputs, outputs)

    def _components(self, function: FunctionSpec) -> Iterator[str]:
        """Yield the components of a function, the denoiser's experts, and what acts beside
        them, by their names.

        Only the expert that is trained, or beside which something is, is needed, unless
        the task runs them all.
        """
        experts = self.spec.experts
        runs_all = self.task.runs_sampler or not self.task.from_rows
        for name in function.components:
            if name in LOSS_CONTEXT:
                continue
            role = component_of(name)
            if experts is None or role not in experts.roles:
                yield name
                continue
            trained = {experts.expert_of(one) for one in self.trainables}
            chosen = [one for one in experts.components if one in trained]
            for expert in experts.components if runs_all or not chosen else chosen:
                yield experts.component(role, expert) + name.removeprefix(role)

    def _inputs(self, function: FunctionSpec, branch: str) -> dict[str, str]:
        """Return the keys of a function's inputs that a branch has, by their names."""
        absent = set(self.spec.inputs) - self.available
        keys = {}
        for name in function.inputs:
            key = value_key(self.spec, name, branch)
            # The negative branch has an input of its own, which may be absent.
            if name in self.available and key not in absent:
                keys[name] = key
        return keys

    def check(self, columns: tuple[str, ...]) -> None:
        """Refuse what the task lacks; see `make_plan`."""
        where = self.spec.where
        missing = [
            (reader, name)
            for reader in self.readers
            for name in reader.required
            if name not in self.available
        ]
        if missing:
            reader, name = missing[0]
            roots = {root for _, one in missing for root in self._roots(one)}
            absent = [self._named_input(root, columns) for root in sorted(roots)]
            what = (
                f"{reader.name} needs {name}, and there is no {' and no '.join(absent)}"
            )
            unit = self.spec.makers.get(name)
            if unit is None:
                source = self.spec.inputs.get(name)
                advice = source.advice if isinstance(source, Column) else ""
                raise UsageError(where, what, *([advice] if advice else []))
            why = f"is skipped ({self.skipped[unit.name]})"
            raise UsageError(where, what, f"unit {unit.name}, which computes it, {why}")
        required = {name for unit in self.units for name in unit.required}
        for name, other in self.spec.cfg_inputs.items():
            needed = NEGATIVE in self.task.branches and name in required
            if needed and other not in self.available:
                what = f"task {self.task.name} needs the negative branch, and input {other!r} is absent"
                raise UsageError(where, what)
        in_training = self.components["train"]
        for name in self.trainables:
            if name not in in_training:
                what = f"cannot train {name!r}: task {self.task.name} does not use it"
                used_here = f"used in a training step: {', '.join(in_training)}"
                raise UsageError(where, what, used_here)

    def _roots(self, name: str) -> Iterator[str]:
        """Yield the absent inputs without which a value cannot be computed."""
        unit = self.spec.makers.get(name)
        if unit is None:
            yield name
            return
        for required in unit.required:
            if required not in self.available:
                yield from self._roots(required)

    def _named_input(self, name: str, columns: tuple[str, ...]) -> str:
        source = self.spec.inputs.get(name)
        from_table = self.task.from_rows or columns
        if not from_table or not isinstance(source, Column):
            return f"input {name!r}"
        return f"column {source.name!r} (input {name}){nearest(source.name, columns)}"


def _units_in_training(units: Iterable[Unit], changing: set[str]) -> list[Unit]:
    """Return the units that use a component that changes, and those that use their outputs."""
    found: list[Unit] = []
    computed: set[str] = set()
    for unit in units:
        if changing & set(unit.components) or computed & set(unit.inputs):
            found.append(unit)
            computed |= set(unit.outputs)
    return found


class UnitStages(NamedTuple):
    """The units of the two stages of split training, each in the order in which they run."""

    data_process: tuple[Unit, ...]
    """Those whose outputs are the same in every epoch, so that they can be stored."""
    train: tuple[Unit, ...]
    """Those that run in each step."""


def split_units(
    units: PipelineSpec | Iterable[Callable[..., Any] | Unit],
    trainables: str | Iterable[str],
) -> UnitStages:
    """Split units into two stages by what their signatures declare; nothing is loaded.

    A unit runs in each step if it uses a component that is trained, or `rng`, or an
    output of such a unit. Raises UsageError for a function that is no unit, and for a
    component that the pipeline does not have.

    Args:
        units: A pipeline's spec; or functions, or units, in the order in which they run,
            of which any component may be trained, since model_fn may use others.
        trainables: Names of trained components, or of parts of them: a list, or text
            with commas.
    """
    known: Collection[str] | None = None
    if isinstance(units, PipelineSpec):
        known, units = units.components, units.units
    all_units = [one if isinstance(one, Unit) else Unit(one) for one in units]
    text = trainables if isinstance(trainables, str) else ",".join(trainables)
    names = {name.strip().partition(".")[0] for name in text.split(",")} - {""}
    for name in sorted(names):
        if known is not None and name not in known:
            what = f"the pipeline has no component {name!r}{nearest(name, known)}"
            raise UsageError("trainables", what, f"components: {', '.join(known)}")
    changing = {"rng", *names}
    in_training = _units_in_training(all_units, changing)
    cached = tuple(unit for unit in all_units if unit not in in_training)
    return UnitStages(cached, tuple(in_training))


def make_plan(
    spec: PipelineSpec,
    inputs: frozenset[str],
    task: Task,
    trainables: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> Plan:
    """Plan a task for the inputs that are present.

    Args:
        spec: The variant.
        inputs: Names of the inputs that a row or a caller gives.
        task: The loss and its inputs.
        trainables: Names of components; a dotted name counts as its component.
        columns: The dataset's, to suggest the most similar one for a missing input.

    Raises UsageError when the task needs an input that is absent, or does not use a
    component that is trained.
    """
    spec = spec.with_task_inputs(task)
    check_components(spec, task.loss, LOSS_CONTEXT)
    inputs |= frozenset(spec.constants)
    trained = tuple(dict.fromkeys(name.partition(".")[0] for name in trainables))
    plan = Plan(spec, task, inputs, trained)
    plan.check(columns)
    return plan
