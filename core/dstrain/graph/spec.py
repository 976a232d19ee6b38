"""The wiring of one variant: what it declares, checked when it is built, before
anything is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Setting, Size, Source
from dstrain.graph.schedule import FlowMatchSchedule
from dstrain.graph.task import Task
from dstrain.graph.unit import AMBIENT, LENT_TO_LOSS, Signature, Unit, component_of

GIVEN_TO_MODEL_FN = ("noisy", "timestep")
GIVEN_TO_HOLD = ("latents", "timestep", "noise")
GIVEN_TO_DECODER = ("latents",)


@dataclass(frozen=True)
class Expert:
    """A denoiser in several parts, each for its own timesteps.

    role: the name model_fn borrows. ranges: part -> (least, greatest) timestep, 0 to
    1000, the noisiest part first.
    """

    role: str
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
class Wiring:
    """What a variant declares. Everything here is checked when it is built; nothing is
    loaded.

    model_fn: predict(noisy, timestep, conditions, *, components) -> prediction, shaped
    as noisy. inputs: the table from data-set columns to inputs. per_side: input of the
    positive side -> of the negative one. latent_shape: inputs -> shape (1, channels,
    ...) of the latents. hold: fixes latents, timesteps and the loss mask. guide:
    (positive, negative, scale) -> prediction. padded: value name -> axis along which a
    batch is padded with zeros. unreached: component -> patterns of parameters that no
    loss reaches ('{last}' is the last block's index). defaults: default arguments of
    inference, by the names of inputs and of `sampler.Sampling`.
    """

    family: str
    variant: str
    components: tuple[str, ...]
    units: tuple[Unit, ...]
    model_fn: Signature
    decoders: tuple[Unit, ...]
    inputs: Mapping[str, Source]
    schedule: FlowMatchSchedule
    latent_shape: Signature
    guide: Callable[[Any, Any, float], Any]
    hold: Signature | None = None
    expert: Expert | None = None
    per_side: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    padded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unreached: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check(self)

    @property
    def makers(self) -> dict[str, Unit]:
        """Value name -> the one unit that makes it."""
        return {name: unit for unit in self.units for name in unit.makes}

    @property
    def settings(self) -> dict[str, Setting]:
        """The inputs that are constants of the variant."""
        return {
            name: source
            for name, source in self.inputs.items()
            if isinstance(source, Setting)
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
        return "frames" in self.decoders[-1].makes.values()

    @property
    def sided(self) -> frozenset[str]:
        """Names that have one value per side: the per-side inputs and whatever is made
        from them.
        """
        names = set(self.per_side)
        for unit in self.units:
            if names & set(unit.reads) or "side" in unit.borrows:
                names |= set(unit.makes)
        return frozenset(names)

    def joined(self, task: Task) -> "Wiring":
        """The wiring with the task's own inputs in its table; raises UsageError for a
        name that both declare.
        """
        inputs = task.joined(self.inputs, f"{self.family} {self.variant}")
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
            if isinstance(source, Size) and source.of in inputs
        }
        available = {*inputs, *measured, *self.settings}
        for unit in self.units:
            if available.issuperset(unit.required):
                available |= set(unit.makes)
        readers = (self.model_fn, *([self.hold] if self.hold else []))
        return all(available.issuperset(reader.required) for reader in readers)


def check(wiring: Wiring) -> None:
    """Refuse a wiring whose names do not fit together, naming the two places that
    disagree.
    """
    where = f"{wiring.family} {wiring.variant}"
    _check_components(wiring, where)
    makers: dict[str, str] = {}
    names = [unit.name for unit in wiring.units]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            where,
            f"two units are named {', '.join(sorted(twice))}; a name is given once",
        )
    all_made = {name for unit in wiring.units for name in unit.makes}
    for unit in wiring.units:
        for name in unit.makes:
            if name in wiring.inputs:
                raise UsageError(
                    where,
                    f"{name!r} is an input and is made by unit {unit.name}; a name is one or the other",
                )
            if name in makers:
                raise UsageError(
                    where,
                    f"{name!r} is made by unit {makers[name]} and by unit {unit.name}; one must use a new name",
                )
        for name in unit.reads:
            if name in all_made and name not in makers:
                raise UsageError(
                    where,
                    f"unit {unit.name} reads {name!r} before the unit that makes it; change the order",
                )
            _known(name, {*wiring.inputs, *makers}, f"{where}: unit {unit.name}")
        makers.update(dict.fromkeys(unit.makes, unit.name))
        check_borrows(unit, wiring, where, AMBIENT)
    known = {*wiring.inputs, *makers}
    for reader in (
        wiring.model_fn,
        wiring.latent_shape,
        *([wiring.hold] if wiring.hold else []),
    ):
        for name in reader.reads:
            _known(name, known, f"{where}: {reader.name}")
        check_borrows(reader, wiring, where, AMBIENT)
    for decoder in wiring.decoders:
        for name in decoder.reads:
            _known(name, known, f"{where}: {decoder.name}")
        known |= set(decoder.makes)
        check_borrows(decoder, wiring, where, AMBIENT)
    for positive, negative in wiring.per_side.items():
        for name in (positive, negative):
            _known(name, set(wiring.inputs), f"{where}: per_side")
    for name in wiring.padded:
        _known(name, known, f"{where}: padded")


def _check_components(wiring: Wiring, where: str) -> None:
    for name in wiring.components:
        if name in LENT_TO_LOSS:
            raise UsageError(
                where,
                f"a component is named {name!r}, which is always lent; give it another name",
            )
    for part in wiring.expert.components if wiring.expert else ():
        if part not in wiring.components:
            raise UsageError(
                where,
                f"expert part {part!r} is no component{nearest(part, wiring.components)}",
            )
    for name, source in wiring.inputs.items():
        if isinstance(source, Size):
            _known(source.of, set(wiring.inputs), f"{where}: the size of input {name}")


def _known(name: str, known: set[str], where: str) -> None:
    if name not in known:
        raise UsageError(
            where,
            f"reads {name!r}, which is neither an input nor made by an earlier unit{nearest(name, known)}",
        )


def check_borrows(
    reader: Signature, wiring: Wiring, where: str, lent: frozenset[str]
) -> None:
    """Refuse a function that borrows what is neither a component nor among the names
    lent to it.
    """
    roles = {wiring.expert.role} if wiring.expert else set()
    for name in reader.borrows:
        if name not in lent and component_of(name) not in {*wiring.components, *roles}:
            hint = nearest(name, wiring.components)
            raise UsageError(
                where, f"{reader.name} borrows {name!r}, which is no component{hint}"
            )
