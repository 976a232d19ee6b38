"""Declare the pipeline spec of a variant, which is checked when it is built, before
anything is loaded.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.graph.frozen import ConvertedField, freeze
from dstrain.graph.function_spec import CONTEXT, FunctionSpec, component_of
from dstrain.graph.inputs import (
    Column,
    Constant,
    InferenceOnly,
    Input,
    Measured,
    with_measured,
)
from dstrain.graph.noise_process import (
    EULER,
    FlowMatchSchedule,
    MakeSampler,
    NoiseProcess,
    constrain_nothing,
)
from dstrain.graph.timestep_sampler import TimestepSampler
from dstrain.graph.unit import Task, Unit


@dataclass(frozen=True)
class ExpertSchedule:
    """A denoiser in several components, each for its own timesteps."""

    denoiser: str
    """Name by which functions ask for the expert of their timestep."""
    ranges: Mapping[str, tuple[float, float]]
    """Component -> (least, greatest) timestep, 0 to 1000, the noisiest expert first."""
    companions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name by which functions ask for what acts beside an expert, such as an adapter, where
    each has its own -> expert -> that component.
    """

    @property
    def components(self) -> tuple[str, ...]:
        """Return the experts, the noisiest first."""
        return tuple(self.ranges)

    @property
    def roles(self) -> Mapping[str, tuple[str, ...]]:
        """Return each name that functions ask by -> the components that it stands for, one
        per expert.
        """
        names = (self.denoiser, *self.companions)
        return {
            name: tuple(self.component(name, one) for one in self.ranges)
            for name in names
        }

    def __post_init__(self) -> None:
        freeze(self)

    def component(self, role: str, expert: str) -> str:
        """Return the component that a name stands for where an expert acts."""
        return self.companions[role][expert] if role in self.companions else expert

    def expert_of(self, component: str) -> str:
        """Return the expert that a component is, or acts beside; '' for another one."""
        for components in self.roles.values():
            if component in components:
                return self.components[components.index(component)]
        return ""

    def choose(self, timestep: float) -> str:
        """Return the expert of a timestep: the first whose range is not above it."""
        for component, (least, _) in self.ranges.items():
            if timestep >= least:
                return component
        return self.components[-1]


GIVEN_TO_MODEL_FN = ("noisy_latents", "timestep")
GIVEN_TO_CONSTRAIN_LATENTS = ("latents", "timestep", "noise")
GIVEN_TO_DECODER = ("latents",)
PLACE = frozenset({"device", "dtype"})
"""Context of functions that are called for a whole batch."""
SAMPLING_ARGUMENTS = (
    "num_inference_steps",
    "guidance_scale",
    "seed",
    "rand_device",
    "sampler",
)
"""Arguments of inference that a variant may have a default for, as for its inputs."""
Function = Callable[..., Any]


def as_spec(
    function: Function | FunctionSpec | None, given: tuple[str, ...] = ()
) -> FunctionSpec:
    """Return the spec of a function that its caller gives these parameters; what is a
    spec already stays as it is. None is a variant without `constrain_latents`.
    """
    if isinstance(function, FunctionSpec):
        return function
    return FunctionSpec.of(function or constrain_nothing, given)


def as_units(
    functions: Sequence[Function | Unit], given: tuple[str, ...] = ()
) -> tuple[Unit, ...]:
    """Return functions as units; those that are units already stay as they are."""
    return tuple(
        one if isinstance(one, Unit) else Unit(one, given=given) for one in functions
    )


Units = ConvertedField[Sequence[Function | Unit], tuple[Unit, ...]]
"""A field of functions, which become units."""


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Declare a variant with plain functions.

    Parameters of a function before the `*` are values that it reads, those after it are
    components, or names of the context: `device`, `dtype`, `branch`, `rng`,
    `<component>_config`. Raises UsageError, naming the two places that disagree, when
    names do not fit together.
    """

    components: tuple[str, ...]
    units: Units = ConvertedField(as_units)
    """Functions of preprocessing in the order in which they run."""
    model_fn: ConvertedField[Function | FunctionSpec, FunctionSpec] = ConvertedField(
        partial(as_spec, given=GIVEN_TO_MODEL_FN)
    )
    """(noisy_latents, timestep, conditions, *, components) -> what `schedule`
    says that is predicted, shaped as noisy_latents.
    """
    decoders: Units = ConvertedField(partial(as_units, given=GIVEN_TO_DECODER))
    """Units that are also given `latents`; inference returns the last output."""
    inputs: Mapping[str, Input]
    """Name -> where its value comes from."""
    schedule: NoiseProcess
    """How data becomes noise, and what model_fn predicts."""
    samplers: Mapping[str, MakeSampler] = field(default_factory=dict)
    """Name -> what makes a sampler that inference may use; `defaults` has the published
    one as `sampler`. Flow matching has `euler` besides, which is the default of all.
    """
    latent_shape: ConvertedField[Function | FunctionSpec, FunctionSpec] = (
        ConvertedField(as_spec)
    )
    """(inputs) -> shape of the latents, (1, channels, ...)."""
    apply_guidance: Callable[..., Any]
    """(positive, negative, guidance_scale) -> prediction; with a parameter `timestep` it is
    given that, too, (batch,).
    """
    no_guidance: float = 1.0
    """The scale up to which there is no guidance."""
    guidance_interval: tuple[float, float] | None = None
    """Least and greatest timestep that are guided, None for all (Kynkäänniemi et al. 2024, "Applying
    Guidance in a Limited Interval").
    """
    constrain_latents: ConvertedField[Function | FunctionSpec | None, FunctionSpec] = (
        ConvertedField(partial(as_spec, given=GIVEN_TO_CONSTRAIN_LATENTS), default=None)
    )
    """(latents, timestep, noise, conditions) -> `LatentConstraint`."""
    experts: ExpertSchedule | None = None
    denoiser_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that this variant's denoiser has, and by which it is
    recognized. True and False stand for any value and for none.
    """
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
    defaults_from: Mapping[str, Callable[[Any], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """Input -> (its value) -> arguments that take the place of those in `defaults`."""
    training_defaults: Mapping[str, str] = field(default_factory=dict)
    """Default options of training, `timestep_sampling` and `loss_weighting`, where they
    are not those of the noise process.
    """
    family: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        freeze(self)
        if self.experts is not None:
            experts = chain(*self.experts.roles.values())
            _check(self, "experts", experts, self.components, "a component")
        unused = self.unused_parameters
        _check(self, "unused_parameters", unused, self.components, "a component")
        _check_inputs(self)
        pairs = self.cfg_inputs.items()
        _check(self, "cfg_inputs", chain(*pairs), self.inputs, "an input")
        arguments = f"an input or one of {', '.join(SAMPLING_ARGUMENTS)}"
        known = {*self.inputs, *SAMPLING_ARGUMENTS}
        _check(self, "defaults", self.defaults, known, arguments)
        _check(self, "defaults_from", self.defaults_from, self.inputs, "an input")
        is_flow = isinstance(self.schedule, FlowMatchSchedule)
        samplers = {*self.samplers, EULER} if is_flow else self.samplers
        sampler = self.defaults.get("sampler", EULER)
        _check(self, "the default sampler", [sampler], samplers, "one of `samplers`")
        options = self.schedule.training_defaults
        kind = f"one of {', '.join(options)}"
        _check(self, "training_defaults", self.training_defaults, options, kind)
        own = self.defaults_of_training
        try:
            TimestepSampler(
                self.schedule, own["timestep_sampling"], own["loss_weighting"]
            )
        except UsageError as error:
            place = f"{self.where}: training_defaults"
            raise UsageError(place, error.what, *error.help_lines) from error
        values = _check_units(self)
        _check(self, "padded", self.padded, values, "an input or an output of a unit")
        _check_function(self, self.model_fn, values, PLACE | {"branch"})
        _check_function(self, self.latent_shape, values, PLACE)
        _check_function(self, self.constrain_latents, values, PLACE)
        for decoder in self.decoders:
            _check_function(self, decoder, values, CONTEXT)
            values |= set(decoder.outputs)

    def named(self, family: str, variant: str) -> "PipelineSpec":
        """Return the spec as a family's variant; raises UsageError for an input that
        nothing uses.
        """
        spec = replace(self, family=family, variant=variant)
        used = set(self.cfg_inputs.values())
        functions = (*self.units, *self.step_functions, self.latent_shape)
        for function in (*functions, *self.decoders):
            used |= set(function.inputs)
        for source in self.inputs.values():
            if isinstance(source, Measured):
                used.add(source.of)
        for name in self.inputs:
            if name not in used:
                what = f"input {name!r} is used by no function; remove it"
                raise UsageError(spec.where, what)
        return spec

    @property
    def defaults_of_training(self) -> dict[str, str]:
        """Return the options of training that a user need not give -> their values."""
        return {**self.schedule.training_defaults, **self.training_defaults}

    @property
    def where(self) -> str:
        """Return the name of the spec in errors."""
        if self.family:
            return f"{self.family} {self.variant}"
        return f"pipeline spec with {self.model_fn.where}"

    @property
    def step_functions(self) -> tuple[FunctionSpec, ...]:
        """Return the functions that each step of training and of inference calls."""
        return self.model_fn, self.constrain_latents

    @property
    def makers(self) -> dict[str, Unit]:
        """Return value name -> the unit whose output it is."""
        return {name: unit for unit in self.units for name in unit.outputs}

    @property
    def constants(self) -> dict[str, Constant]:
        """Return the inputs that are constants of the variant."""
        return {
            name: source
            for name, source in self.inputs.items()
            if isinstance(source, Constant)
        }

    def inputs_of_rows(self, asked: Collection[str]) -> frozenset[str]:
        """Return the inputs that rows can have, optional ones if they are asked for."""
        return frozenset(
            name
            for name, source in self.inputs.items()
            if not isinstance(source, InferenceOnly)
            and (name in asked or not getattr(source, "optional", False))
        )

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
    def makes_layers(self) -> bool:
        """Return whether inference returns a list of images, which may be transparent."""
        return "list[image]" in self.decoders[-1].outputs.values()

    @property
    def branched(self) -> frozenset[str]:
        """Return the names that have a value per branch: the `cfg_inputs`, and what
        follows from them.
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
        for name, source in task.inputs.items():
            if self.inputs.get(name, source) != source:
                what = f"its input {name!r} is also one of {self.where}; rename one of them"
                raise UsageError(f"task {task.name}", what)
        return replace(self, inputs={**self.inputs, **task.inputs})

    def find_available(
        self, inputs: Iterable[str]
    ) -> tuple[frozenset[str], dict[str, str]]:
        """Return the values that these inputs lead to, and the units that are skipped
        with the reason: a required input is absent, or an output of a skipped unit.
        """
        available = set(inputs)
        skipped = {}
        makers = self.makers
        for unit in self.units:
            absent = [name for name in unit.required if name not in available]
            if not absent:
                available |= set(unit.outputs)
                continue
            reasons = []
            for name in absent:
                maker = makers.get(name)
                why = f" (unit {maker.name} is skipped)" if maker else ""
                reasons.append(name + why)
            skipped[unit.name] = "absent: " + ", ".join(reasons)
        return frozenset(available), skipped

    def can_train(self, inputs: frozenset[str]) -> bool:
        """Return whether model_fn and constrain_latents get what they require from
        these inputs and what is measured on them.
        """
        present = with_measured(inputs, self.inputs)
        available, _ = self.find_available({*present, *self.constants})
        return all(available.issuperset(one.required) for one in self.step_functions)


def _check_inputs(spec: PipelineSpec) -> None:
    """Check that the inputs that others refer to exist, and that masks come after what
    they are of.
    """
    earlier: list[str] = []
    for name, source in spec.inputs.items():
        place = f"inputs: {name}"
        if isinstance(source, Measured):
            _check(spec, place, [source.of], spec.inputs, "an input")
        if isinstance(source, Column) and source.entries is not None:
            _check(spec, place, [source.entries.of], spec.inputs, "an input")
        if isinstance(source, Column) and source.of:
            kind = "an image or a video before it"
            _check(spec, place, [source.of], earlier, kind)
        if isinstance(source, Column) and source.kind in ("image", "video"):
            earlier.append(name)


def _check_units(spec: PipelineSpec) -> set[str]:
    """Return the inputs and the outputs of units; each is read after it exists."""
    names = [unit.name for unit in spec.units]
    makers = dict.fromkeys(spec.inputs, "a pipeline input")
    for unit in spec.units:
        if names.count(unit.name) > 1:
            what = f"two units are named {unit.name}; rename one"
            raise UsageError(spec.where, what)
        _check_function(spec, unit, set(makers), CONTEXT)
        made = f"an output of unit {unit.name}"
        for name in unit.outputs:
            if name in makers:
                what = f"name {name!r} is both {makers[name]} and {made}; rename one"
                raise UsageError(spec.where, what)
            makers[name] = made
    return set(makers)


def _check_function(
    spec: PipelineSpec,
    function: FunctionSpec,
    values: set[str],
    context: frozenset[str],
) -> None:
    kind = "an input or an output of an earlier unit"
    _check(spec, function.name, function.inputs, values, kind)
    check_components(spec, function, context)


def check_components(
    spec: PipelineSpec, function: FunctionSpec, context: frozenset[str]
) -> None:
    """Raise UsageError for a keyword-only parameter that is neither a component nor in
    the context.
    """
    known = {*spec.components}
    if spec.experts is not None:
        known.update(spec.experts.roles)
    names = [name for name in function.components if component_of(name) not in known]
    kind = f"a component or one of {', '.join(sorted(context))}"
    _check(spec, function.name, names, known | context, kind)


def _check(
    spec: PipelineSpec,
    place: str,
    names: Iterable[str],
    known: Collection[str],
    kind: str,
) -> None:
    """Raise UsageError for the first of the names that is not known."""
    for name in names:
        if name not in known:
            what = f"{name!r} is not {kind}{nearest(name, known)}"
            raise UsageError(f"{spec.where}: {place}", what)
