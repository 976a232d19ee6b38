"""Plan a task before any weight is loaded: which units run in which stage, which
components each stage loads, and which values are cached between the stages.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column
from dstrain.graph.spec import PipelineSpec, check_components
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
    """Return the key of a value of one branch: plain for the positive branch,
    'negative.prompt_emb' for another.
    """
    return name if branch == POSITIVE else f"{branch}.{name}"


@dataclass(frozen=True)
class Step:
    """One run of a unit."""

    unit: Unit
    branch: str
    """The branch that it runs for; '' for a unit that runs once for all branches."""
    inputs: Mapping[str, str]
    """The unit's own name of an input -> its key in the table of values."""
    outputs: Mapping[str, str]
    """The unit's own name of an output -> its key in the table of values."""


@dataclass(frozen=True)
class Plan:
    """Which units run in which stage, and what each stage loads; pure data."""

    family: str
    variant: str
    task: str
    branches: tuple[str, ...]
    inputs: frozenset[str]
    """The inputs that are present, constants of the variant included."""
    trainables: tuple[str, ...]
    """The components that are trained."""
    cached_steps: tuple[Step, ...]
    """Stage 1 (data_process)."""
    train_steps: tuple[Step, ...]
    """Stage 2 (train), before model_fn and loss."""
    loss_inputs: tuple[str, ...]
    """Keys of the values that model_fn, constrain_latents and the loss use."""
    cached_values: tuple[str, ...]
    """Keys of the values that are stored between the stages."""
    cached_kinds: Mapping[str, str]
    """Key of a cached value -> its kind."""
    components: Mapping[str, tuple[str, ...]]
    """Stage -> the components that it loads; '' is a run that is not split."""
    configs: Mapping[str, tuple[str, ...]]
    """Stage -> the components of which it reads only the configuration."""
    skipped: Mapping[str, str]
    """Unit that lacks an input -> the reason."""
    unused_units: tuple[str, ...]
    """Units whose outputs nothing uses."""
    used_inputs: frozenset[str]
    """The inputs that a step uses, or that are cached."""


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
    inputs |= frozenset(spec.settings)
    available, skipped = spec.find_available(inputs)
    trained = tuple(dict.fromkeys(name.partition(".")[0] for name in trainables))
    planner = _Planner(spec, task, trained, available, skipped)
    planner.refuse_missing_inputs(columns)
    units = planner.needed_units()
    planner.refuse_missing_branch(units)
    in_training = planner.units_in_training(units)
    steps = [step for unit in units for step in planner.steps_of(unit)]
    cached_steps = tuple(one for one in steps if one.unit not in in_training)
    train_steps = tuple(one for one in steps if one.unit in in_training)
    loss_inputs = planner.loss_inputs()
    cached_values = _cached_values(train_steps, loss_inputs)
    components, configs = planner.loaded(cached_steps, train_steps)
    used = {key for step in steps for key in step.inputs.values()} | {*cached_values}
    unused = [u.name for u in spec.units if u not in units and u.name not in skipped]
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
        cached_kinds={key: _kind(spec, key) for key in cached_values},
        components=components,
        configs=configs,
        skipped=skipped,
        unused_units=tuple(unused),
        used_inputs=frozenset(used & set(spec.inputs)),
    )


def value_key(spec: PipelineSpec, name: str, branch: str) -> str:
    """Return the key under which a branch finds a value.

    It is 'negative_prompt' for an input, 'negative.prompt_emb' for another value of the
    negative branch, and the plain name for a value that all branches share.
    """
    if branch in ("", POSITIVE) or name not in spec.branched:
        return name
    if branch == "negative" and name in spec.cfg_inputs:
        return spec.cfg_inputs[name]
    return branch_key(name, branch)


@dataclass(frozen=True)
class _Planner:
    """What the steps of planning share."""

    spec: PipelineSpec
    task: Task
    trained: tuple[str, ...]
    available: frozenset[str]
    """Names of the inputs that are present and of what can be computed from them."""
    skipped: Mapping[str, str]

    @property
    def readers(self) -> tuple[FunctionSpec, ...]:
        """Return the functions of a training step that follow the units."""
        return *self.spec.step_functions, self.task.loss

    def refuse_missing_inputs(self, columns: tuple[str, ...]) -> None:
        """Refuse a plan that lacks what a function of the training step requires."""
        missing = [
            (reader, name)
            for reader in self.readers
            for name in reader.required
            if name not in self.available
        ]
        if not missing:
            return
        reader, name = missing[0]
        roots = {root for _, one in missing for root in self._roots(one)}
        absent = [self._named_input(root, columns) for root in sorted(roots)]
        why = []
        if name in self.spec.makers:
            unit = self.spec.makers[name].name
            reason = self.skipped[unit]
            why = [f"unit {unit}, which computes it, is skipped ({reason})"]
        what = f"{reader.name} needs {name}, and there is no {' and no '.join(absent)}"
        raise UsageError(self.spec.where, what, *why)

    def refuse_missing_branch(self, units: Iterable[Unit]) -> None:
        """Refuse a task that asks for the negative branch without its input."""
        if "negative" not in self.task.branches:
            return
        for unit in units:
            for name in unit.required:
                other = self.spec.cfg_inputs.get(name, name)
                if other not in self.available:
                    what = f"task {self.task.name} needs the negative branch, and input {other!r} is absent"
                    raise UsageError(self.spec.where, what)

    def needed_units(self) -> list[Unit]:
        """Return the units whose outputs the training step uses, directly or not."""
        wanted = {name for reader in self.readers for name in reader.inputs}
        needed: list[Unit] = []
        # Backwards: a unit is needed if a later one is that uses its outputs.
        for unit in reversed(self.spec.units):
            if unit.name not in self.skipped and wanted & set(unit.outputs):
                needed.insert(0, unit)
                wanted |= set(unit.inputs)
        return needed

    def units_in_training(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units that must run in each training step.

        Those are the units that use `rng` or a trained component, and the units that
        use their outputs.
        """
        changing = {"rng", *self.trained}
        experts = self.spec.experts
        if experts is not None and changing & set(experts.components):
            changing.add(experts.denoiser)
        found: list[Unit] = []
        computed: set[str] = set()
        for unit in units:
            if changing & set(unit.components) or computed & set(unit.inputs):
                found.append(unit)
                computed |= set(unit.outputs)
        return found

    def steps_of(self, unit: Unit) -> Iterator[Step]:
        """Yield the unit once, or once per branch if its outputs differ by branch."""
        by_branch = bool(set(unit.outputs) & self.spec.branched)
        for branch in self.task.branches if by_branch else ("",):
            outputs = {n: branch_key(n, branch or POSITIVE) for n in unit.outputs}
            yield Step(unit, branch, self._inputs(unit, branch), outputs)

    def loss_inputs(self) -> tuple[str, ...]:
        """Return the keys that model_fn uses for every branch, and the other functions
        for the positive one.
        """
        model_fn, *others = self.readers
        keys: list[str] = []
        for branch in self.task.branches:
            keys += self._inputs(model_fn, branch).values()
        for reader in others:
            keys += [name for name in reader.inputs if name in self.available]
        return tuple(dict.fromkeys(keys))

    def loaded(
        self, cached_steps: Iterable[Step], train_steps: Iterable[Step]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
        """Return the components that each stage loads, and those of which it reads only
        the configuration.
        """
        first: list[FunctionSpec] = [step.unit for step in cached_steps]
        second = [*(step.unit for step in train_steps), *self.readers]
        stages = {"data_process": first, "train": second, "": [*first, *second]}
        components = {}
        configs = {}
        known = self.spec.components
        for stage, functions in stages.items():
            used = {name for one in functions for name in self._components(one)}
            whole = [name for name in known if name in used]
            config_only = {component_of(name) for name in used} - set(whole)
            components[stage] = tuple(whole)
            configs[stage] = tuple(name for name in known if name in config_only)
        for name in self.trained:
            if name not in components["train"]:
                what = f"cannot train {name!r}: task {self.task.name} does not use it"
                used_here = f"used in a training step: {', '.join(components['train'])}"
                raise UsageError(self.spec.where, what, used_here)
        return components, configs

    def _components(self, function: FunctionSpec) -> Iterator[str]:
        """Yield the components of a function, the denoiser's experts by their names.

        Only the expert that is trained is needed, unless the task runs them all.
        """
        experts = self.spec.experts
        runs_all = self.task.runs_sampler or not self.task.from_rows
        for name in function.components:
            if name in LOSS_CONTEXT:
                continue
            if experts is None or component_of(name) != experts.denoiser:
                yield name
                continue
            suffix = name.removeprefix(experts.denoiser)
            chosen = [one for one in experts.components if one in self.trained]
            for expert in experts.components if runs_all or not chosen else chosen:
                yield expert + suffix

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


def _cached_values(
    train_steps: Iterable[Step], loss_inputs: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what training uses and does not compute itself."""
    used, computed = set(loss_inputs), set()
    for step in train_steps:
        used |= set(step.inputs.values())
        computed |= set(step.outputs.values())
    return tuple(sorted(used - computed))


def _kind(spec: PipelineSpec, key: str) -> str:
    name = key.rpartition(".")[2]
    if name in spec.makers:
        return spec.makers[name].outputs[name]
    return KINDS_OF_COLUMNS[spec.inputs[name].kind]
