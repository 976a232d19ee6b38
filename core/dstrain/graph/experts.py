"""Define which of several denoisers acts at a timestep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dstrain.graph.frozen import freeze


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
