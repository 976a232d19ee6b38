"""Plan a task before any weight is loaded: which units run in which stage, which
components each stage loads, and which values are cached between the stages.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from dstrain.graph.function_spec import (
    LOSS_CONTEXT,
    NEGATIVE,
    POSITIVE,
    FunctionSpec,
    component_of,
)
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.unit import Task, Unit
from dstrain.graph.unit_stages import units_in_training

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


def value_key(spec: PipelineSpec, name: str, branch: str) -> str:
    """Return the key under which a branch finds a value: 'negative_prompt' for an
    input, 'negative.prompt_emb' for another value of the negative branch, else the
    plain name.
    """
    if branch in ("", POSITIVE) or name not in spec.branched:
        return name
    if branch == NEGATIVE and name in spec.cfg_inputs:
        return spec.cfg_inputs[name]
    return f"{branch}.{name}"


@dataclass(frozen=True)
class Plan:
    """Which units run in which stage, and what each loads: it follows from the four
    fields.
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
        return tuple(
            step for step in self._steps if step.unit not in self._units_in_training
        )

    @cached_property
    def train_steps(self) -> tuple[Step, ...]:
        """Return the steps of stage 2 (train) before model_fn and the loss."""
        return tuple(
            step for step in self._steps if step.unit in self._units_in_training
        )

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
        """Return the units of each training step: those that use `rng` or a trained
        component, and those that use their outputs.
        """
        changing = {"rng", *self.trainables}
        experts = self.spec.experts
        for role, components in experts.roles.items() if experts else ():
            if changing & set(components):
                changing.add(role)
        return units_in_training(self.units, changing)

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
        """Return the steps whose outputs the training step uses, directly or not; a
        unit that one branch needs is not run for the other.
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
        """Yield the components of a function, with the denoiser's experts and what acts
        beside them: of these only what is trained, unless the task runs them all.
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
