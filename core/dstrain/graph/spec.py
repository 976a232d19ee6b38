"""The pipeline spec of a variant: what it declares, checked when it is built, before
anything is loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.graph.frozen import Converted, freeze
from dstrain.graph.inputs import Column, Constant, Input, Measured
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.task import Task
from dstrain.graph.unit import CONTEXT, LOSS_CONTEXT, FunctionSpec, Unit, component_of

GIVEN_TO_MODEL_FN = ("noisy_latents", "timestep")
GIVEN_TO_CONSTRAIN_LATENTS = ("latents", "timestep", "noise")
GIVEN_TO_DECODER = ("latents",)
PLACE = frozenset({"device", "dtype"})
"""The context of functions that are called for a whole batch."""
SAMPLING_ARGUMENTS = ("num_inference_steps", "guidance_scale", "seed", "rand_device")
"""What a variant may have a default of, beside its inputs."""

Function = Callable[..., Any]


def as_spec(given: tuple[str, ...], function: Function | FunctionSpec) -> FunctionSpec:
    """Return the spec of a function that its caller gives these parameters."""
    if isinstance(function, FunctionSpec):
        return function
    return FunctionSpec.of(function, given)


def as_optional_spec(
    given: tuple[str, ...], function: Function | FunctionSpec | None
) -> FunctionSpec | None:
    """Return the spec of a function, None if there is none."""
    return None if function is None else as_spec(given, function)


def as_units(
    given: tuple[str, ...], functions: Sequence[Function | Unit]
) -> tuple[Unit, ...]:
    """Return functions as units; those that are units already stay as they are."""
    return tuple(
        one if isinstance(one, Unit) else Unit(one, given=given) for one in functions
    )


@dataclass(frozen=True)
class ExpertSchedule:
    """A denoiser in several components, each for its own timesteps."""

    denoiser: str
    """The name by which functions ask for the expert whose timestep it is."""
    ranges: Mapping[str, tuple[float, float]]
    """Component -> (least, greatest) timestep, 0 to 1000, the noisiest expert first."""

    def __post_init__(self) -> None:
        freeze(self)

    @property
    def components(self) -> tuple[str, ...]:
        """The experts, the noisiest first."""
        return tuple(self.ranges)

    def choose(self, timestep: float) -> str:
        """Return the expert of a timestep: the first whose range is not above it."""
        for component, (least, _) in self.ranges.items():
            if timestep >= least:
                return component
        return self.components[-1]


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a variant declares, from plain functions.

    Parameters of a function before the `*` are values that it reads, those after it are
    components, or names of the context: `device`, `dtype`, `branch`, `rng`,
    `<component>_config`. Raises UsageError, naming the two places that disagree, when
    names do not fit together.
    """

    components: tuple[str, ...]
    units: Converted[Sequence[Function | Unit], tuple[Unit, ...]] = Converted(
        partial(as_units, ())
    )
    """Functions of preprocessing in the order in which they run."""
    model_fn: Converted[Function | FunctionSpec, FunctionSpec] = Converted(
        partial(as_spec, GIVEN_TO_MODEL_FN)
    )
    """(noisy_latents, timestep, conditions, *, components) -> prediction of
    (noise - x_0), shaped as noisy_latents.
    """
    decoders: Converted[Sequence[Function | Unit], tuple[Unit, ...]] = Converted(
        partial(as_units, GIVEN_TO_DECODER)
    )
    """Units that are also given `latents`; inference returns the last output."""
    inputs: Mapping[str, Input]
    """Name -> where its value comes from."""
    schedule: FlowMatchSchedule
    latent_shape: Converted[Function | FunctionSpec, FunctionSpec] = Converted(
        partial(as_spec, ())
    )
    """(inputs) -> shape of the latents, (1, channels, ...)."""
    apply_guidance: Callable[[Any, Any, float], Any]
    """(positive, negative, guidance_scale) -> prediction."""
    constrain_latents: Converted[
        Function | FunctionSpec | None, FunctionSpec | None
    ] = Converted(partial(as_optional_spec, GIVEN_TO_CONSTRAIN_LATENTS), default=None)
    """(latents, timestep, noise, conditions) -> `LatentConstraint`."""
    experts: ExpertSchedule | None = None
    cfg_inputs: Mapping[str, str] = field(default_factory=dict)
    """Input of the positive branch -> its counterpart in the negative one."""
    padded: Mapping[str, int] = field(default_factory=dict)
    """Value -> axis along which a batch is padded with zeros."""
    unused_parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component -> patterns of parameters that no loss reaches; '{last}' is the index
    of the last block.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default arguments of inference, by input or name of `SAMPLING_ARGUMENTS`."""
    family: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        freeze(self)
        check(self)

    def named(self, family: str, variant: str) -> "PipelineSpec":
        """Return the spec as a family's variant; raises UsageError for an input that
        nothing uses.
        """
        spec = replace(self, family=family, variant=variant)
        for name in spec.inputs:
            if name not in spec.used_inputs:
                raise UsageError(
                    spec.where, f"input {name!r} is used by no function; remove it"
                )
        return spec

    @property
    def where(self) -> str:
        """How errors name the spec."""
        if self.family:
            return f"{self.family} {self.variant}"
        return f"pipeline spec with {self.model_fn.where}"

    @property
    def readers(self) -> Iterator[FunctionSpec]:
        """Every function of the spec."""
        yield from (*self.units, self.model_fn, self.latent_shape)
        if self.constrain_latents is not None:
            yield self.constrain_latents
        yield from self.decoders

    @property
    def used_inputs(self) -> frozenset[str]:
        """Inputs that a function reads, that stand for one in the negative branch, or
        on which one is measured.
        """
        used = {name for reader in self.readers for name in reader.inputs}
        used |= set(self.cfg_inputs.values())
        used |= {
            source.of for source in self.inputs.values() if isinstance(source, Measured)
        }
        return frozenset(used)

    @property
    def makers(self) -> dict[str, Unit]:
        """Value name -> the unit whose output it is."""
        return {name: unit for unit in self.units for name in unit.outputs}

    @property
    def settings(self) -> dict[str, Constant]:
        """The inputs that are constants of the variant."""
        return {
            name: source
            for name, source in self.inputs.items()
            if isinstance(source, Constant)
        }

    @property
    def reads_videos(self) -> bool:
        """Return whether one of its columns names videos."""
        return any(
            isinstance(source, Column) and source.from_video
            for source in self.inputs.values()
        )

    @property
    def makes_video(self) -> bool:
        """Return whether inference returns a video; otherwise it returns an image."""
        return "video" in self.decoders[-1].outputs.values()

    @property
    def branched(self) -> frozenset[str]:
        """Names that have a value per branch: the `cfg_inputs`, and what follows from
        them.
        """
        names = set(self.cfg_inputs)
        for unit in self.units:
            if names & set(unit.inputs) or "branch" in unit.components:
                names |= set(unit.outputs)
        return frozenset(names)

    def with_task_inputs(self, task: Task) -> "PipelineSpec":
        """Return the spec with the task's own inputs; raises UsageError for a name that
        both declare.
        """
        inputs = task.with_task_inputs(self.inputs, self.where)
        if len(inputs) == len(self.inputs):
            return self
        return replace(self, inputs=inputs)

    def can_train(self, inputs: frozenset[str]) -> bool:
        """Return whether model_fn and constrain_latents get what they require from
        these inputs and what is measured on them.
        """
        measured = {
            name
            for name, source in self.inputs.items()
            if isinstance(source, Measured) and source.of in inputs
        }
        available = {*inputs, *measured, *self.settings}
        for unit in self.units:
            if available.issuperset(unit.required):
                available |= set(unit.outputs)
        required = set(self.model_fn.required)
        if self.constrain_latents is not None:
            required |= set(self.constrain_latents.required)
        return available >= required


def check(spec: PipelineSpec) -> None:
    """Raise UsageError when names do not fit together, naming the two places that
    disagree.
    """
    _check_components(spec)
    makers = _check_units(spec)
    known = {*spec.inputs, *makers}
    _check_reader(spec, spec.model_fn, known, PLACE | {"branch"})
    _check_reader(spec, spec.latent_shape, known, PLACE)
    if spec.constrain_latents is not None:
        _check_reader(spec, spec.constrain_latents, known, PLACE)
    for decoder in spec.decoders:
        _check_reader(spec, decoder, known, CONTEXT)
        known |= set(decoder.outputs)
    for names in spec.cfg_inputs.items():
        for name in names:
            _known(name, spec.inputs, f"{spec.where}: cfg_inputs")
    for name in spec.padded:
        _known(name, known, f"{spec.where}: padded")
    for name in spec.defaults:
        arguments = (*spec.inputs, *SAMPLING_ARGUMENTS)
        if name not in arguments:
            hint = nearest(name, arguments)
            raise UsageError(
                f"{spec.where}: defaults",
                f"{name!r} is neither an input nor one of {', '.join(SAMPLING_ARGUMENTS)}{hint}",
            )


def _check_components(spec: PipelineSpec) -> None:
    for name in spec.components:
        if name in LOSS_CONTEXT:
            raise UsageError(
                spec.where,
                f"component name {name!r} is reserved for the context; rename the component",
            )
    experts = spec.experts.components if spec.experts else ()
    for place, names in (
        ("expert", experts),
        ("unused_parameters:", tuple(spec.unused_parameters)),
    ):
        for name in names:
            if name not in spec.components:
                hint = nearest(name, spec.components)
                raise UsageError(
                    spec.where, f"{place} {name!r} is not a component{hint}"
                )
    for name, source in spec.inputs.items():
        if isinstance(source, Measured):
            _known(source.of, spec.inputs, f"{spec.where}: the size of input {name}")


def _check_units(spec: PipelineSpec) -> dict[str, str]:
    """Return value name -> the unit whose output it is; each is read after it exists."""
    where = spec.where
    names = [unit.name for unit in spec.units]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(
            where, f"two units are named {', '.join(repeated)}; rename one"
        )
    all_outputs = spec.makers
    makers: dict[str, str] = {}
    for unit in spec.units:
        for name in unit.inputs:
            if name in all_outputs and name not in makers:
                raise UsageError(
                    where,
                    f"unit {unit.name} reads {name!r} before unit {all_outputs[name].name} "
                    "outputs it; change the order",
                )
        _check_reader(spec, unit, {*spec.inputs, *makers}, CONTEXT)
        for name in unit.outputs:
            if name in spec.inputs:
                raise UsageError(
                    where,
                    f"name {name!r} is both a pipeline input and an output of unit "
                    f"{unit.name}; rename one",
                )
            if name in makers:
                raise UsageError(
                    where,
                    f"{name!r} is an output of unit {makers[name]} and of unit "
                    f"{unit.name}; rename one",
                )
            makers[name] = unit.name
    return makers


def _check_reader(
    spec: PipelineSpec, reader: FunctionSpec, known: set[str], context: frozenset[str]
) -> None:
    for name in reader.inputs:
        _known(name, known, f"{spec.where}: {reader.name}")
    check_borrows(reader, spec, spec.where, context)


def _known(name: str, known: set[str] | Mapping[str, Any], where: str) -> None:
    if name not in known:
        raise UsageError(
            where,
            f"reads {name!r}, which is neither an input nor an output of an earlier "
            f"unit{nearest(name, known)}",
        )


def check_borrows(
    reader: FunctionSpec, spec: PipelineSpec, where: str, context: frozenset[str]
) -> None:
    """Raise UsageError for a keyword-only parameter that is neither a component nor in
    the context.
    """
    known = {*spec.components}
    if spec.experts is not None:
        known.add(spec.experts.denoiser)
    for name in reader.components:
        if name in context:
            continue
        if name in LOSS_CONTEXT:
            raise UsageError(
                where,
                f"{reader.name} asks for {name!r}, which it cannot have; its context is "
                f"{', '.join(sorted(context))}",
            )
        if component_of(name) not in known:
            hint = nearest(name, spec.components)
            raise UsageError(
                where,
                f"{reader.name} asks for {name!r}, which is not a component{hint}",
            )
