"""The pipeline spec of one variant: what it declares, checked when it is built, before
anything is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Constant, Input, Measured
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.task import Task
from dstrain.graph.unit import CONTEXT, LOSS_CONTEXT, FunctionSpec, Unit, component_of

GIVEN_TO_MODEL_FN = ("noisy_latents", "timestep")
GIVEN_TO_CONSTRAIN_LATENTS = ("latents", "timestep", "noise")
GIVEN_TO_DECODER = ("latents",)


@dataclass(frozen=True)
class ExpertSchedule:
    """A denoiser in several parts, each for its own timesteps.

    role: the name model_fn borrows. ranges: part -> (least, greatest) timestep, 0 to
    1000, the noisiest part first.
    """

    denoiser: str
    ranges: Mapping[str, tuple[float, float]]

    @property
    def components(self) -> tuple[str, ...]:
        """The parts, the noisiest first."""
        return tuple(self.ranges)

    def choose(self, timestep: float) -> str:
        """The part for a timestep: the first whose range does not lie above it."""
        fitting = (
            part for part, (least, _) in self.ranges.items() if timestep >= least
        )
        return next(fitting, self.components[-1])


@dataclass(frozen=True)
class PipelineSpec:
    """What a variant declares. Everything here is checked when it is built; nothing is
    loaded.

    model_fn: predict(noisy, timestep, conditions, *, components) -> prediction, shaped
    as noisy. inputs: the table from data-set columns to inputs. cfg_inputs: input of the
    positive side -> of the negative one. latent_shape: inputs -> shape (1, channels,
    ...) of the latents. hold: fixes latents, timesteps and the loss mask. guide:
    (positive, negative, scale) -> prediction. padded: value name -> axis along which a
    batch is padded with zeros. unused_parameters: component -> patterns of parameters that no
    loss reaches ('{last}' is the last block's index). defaults: default arguments of
    inference, by the names of inputs and of `sampler.Sampling`.
    """

    family: str
    variant: str
    components: tuple[str, ...]
    units: tuple[Unit, ...]
    model_fn: FunctionSpec
    decoders: tuple[Unit, ...]
    inputs: Mapping[str, Input]
    schedule: FlowMatchSchedule
    latent_shape: FunctionSpec
    apply_guidance: Callable[[Any, Any, float], Any]
    constrain_latents: FunctionSpec | None = None
    experts: ExpertSchedule | None = None
    cfg_inputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    padded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unused_parameters: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check(self)

    @property
    def makers(self) -> dict[str, Unit]:
        """Value name -> the one unit that makes it."""
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
        """Whether a column of it names videos."""
        return any(
            isinstance(source, Column) and source.from_video
            for source in self.inputs.values()
        )

    @property
    def makes_video(self) -> bool:
        """Whether the variant's last decoder makes frames; otherwise a picture."""
        return "video" in self.decoders[-1].outputs.values()

    @property
    def branched(self) -> frozenset[str]:
        """Names that have one value per side: the per-side inputs and whatever is made
        from them.
        """
        names = set(self.cfg_inputs)
        for unit in self.units:
            if names & set(unit.inputs) or "branch" in unit.components:
                names |= set(unit.outputs)
        return frozenset(names)

    def with_task_inputs(self, task: Task) -> "PipelineSpec":
        """The pipeline spec with the task's own inputs in its table; raises UsageError for a
        name that both declare.
        """
        inputs = task.with_task_inputs(self.inputs, f"{self.family} {self.variant}")
        return (
            self
            if len(inputs) == len(self.inputs)
            else replace(self, inputs=MappingProxyType(inputs))
        )

    def can_train(self, inputs: frozenset[str]) -> bool:
        """Whether model_fn and hold get what they require from these inputs and those
        measured on them.
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
        readers = (
            self.model_fn,
            *([self.constrain_latents] if self.constrain_latents else []),
        )
        return all(available.issuperset(reader.required) for reader in readers)


def check(spec: PipelineSpec) -> None:
    """Refuse a pipeline spec whose names do not fit together, naming the two places that
    disagree.
    """
    where = f"{spec.family} {spec.variant}"
    _check_components(spec, where)
    makers: dict[str, str] = {}
    names = [unit.name for unit in spec.units]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            where,
            f"two units are named {', '.join(sorted(twice))}; a name is given once",
        )
    all_made = {name for unit in spec.units for name in unit.outputs}
    for unit in spec.units:
        for name in unit.outputs:
            if name in spec.inputs:
                raise UsageError(
                    where,
                    f"{name!r} is an input and is made by unit {unit.name}; a name is one or the other",
                )
            if name in makers:
                raise UsageError(
                    where,
                    f"{name!r} is made by unit {makers[name]} and by unit {unit.name}; one must use a new name",
                )
        for name in unit.inputs:
            if name in all_made and name not in makers:
                raise UsageError(
                    where,
                    f"unit {unit.name} reads {name!r} before the unit that makes it; change the order",
                )
            _known(name, {*spec.inputs, *makers}, f"{where}: unit {unit.name}")
        makers.update(dict.fromkeys(unit.outputs, unit.name))
        check_borrows(unit, spec, where, CONTEXT)
    known = {*spec.inputs, *makers}
    for reader in (
        spec.model_fn,
        spec.latent_shape,
        *([spec.constrain_latents] if spec.constrain_latents else []),
    ):
        for name in reader.inputs:
            _known(name, known, f"{where}: {reader.name}")
        check_borrows(reader, spec, where, CONTEXT)
    for decoder in spec.decoders:
        for name in decoder.inputs:
            _known(name, known, f"{where}: {decoder.name}")
        known |= set(decoder.outputs)
        check_borrows(decoder, spec, where, CONTEXT)
    for positive, negative in spec.cfg_inputs.items():
        for name in (positive, negative):
            _known(name, set(spec.inputs), f"{where}: cfg_inputs")
    for name in spec.padded:
        _known(name, known, f"{where}: padded")


def _check_components(spec: PipelineSpec, where: str) -> None:
    for name in spec.components:
        if name in LOSS_CONTEXT:
            raise UsageError(
                where,
                f"a component is named {name!r}, which is always lent; give it another name",
            )
    for part in spec.experts.components if spec.experts else ():
        if part not in spec.components:
            raise UsageError(
                where,
                f"expert part {part!r} is no component{nearest(part, spec.components)}",
            )
    for name, source in spec.inputs.items():
        if isinstance(source, Measured):
            _known(source.of, set(spec.inputs), f"{where}: the size of input {name}")


def _known(name: str, known: set[str], where: str) -> None:
    if name not in known:
        raise UsageError(
            where,
            f"reads {name!r}, which is neither an input nor made by an earlier unit{nearest(name, known)}",
        )


def check_borrows(
    reader: FunctionSpec, spec: PipelineSpec, where: str, lent: frozenset[str]
) -> None:
    """Refuse a function that borrows what is neither a component nor among the names
    lent to it.
    """
    roles = {spec.experts.denoiser} if spec.experts else set()
    for name in reader.components:
        if name not in lent and component_of(name) not in {*spec.components, *roles}:
            hint = nearest(name, spec.components)
            raise UsageError(
                where, f"{reader.name} borrows {name!r}, which is no component{hint}"
            )
