"""Draw the sigmas that training steps use, and weight their losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.noise_schedule import TRAIN_TIMESTEPS, FlowMatchSchedule
from dstrain.randomness import Rng

STRATA = 4
"""Parts of the distribution of timesteps that validation draws from one by one."""


@dataclass(frozen=True)
class TimestepSampler:
    """Distribution of the sigmas that a training run draws, and their loss weights."""

    schedule: FlowMatchSchedule
    sampling: str = "shifted"
    weighting: str = "bsmntw"
    min_boundary: float = 0.0
    """Start of the range that is trained, as a fraction of the table (0 = noisiest)."""
    max_boundary: float = 1.0
    """End of that range."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_boundary < self.max_boundary <= 1.0:
            bounds = f"{self.min_boundary} and {self.max_boundary}"
            what = f"expected 0 <= min < max <= 1, got {bounds}"
            raise UsageError("--min_timestep_boundary", what)

    def draw(self, rng: Rng) -> Tensor:
        """Return (batch,) fp32 sigmas, one per sample."""
        if self.sampling == "uniform":
            top = self.schedule.table[self._index(self.min_boundary)]
            bottom = self.schedule.table[self._index(self.max_boundary)]
            return bottom + (top - bottom) * rng.uniform("timestep")
        span = self.max_boundary - self.min_boundary
        # In Python floats, whose rounding decides the index.
        density = self._density(rng).tolist()
        indices = [self._index(self.min_boundary + part * span) for part in density]
        # Numpy picks them in an eighth of torch's time.
        return torch.from_numpy(self.schedule.table.numpy()[indices])

    def stratified(self) -> "StratifiedSampler":
        """Return the sampler of the same distribution in equal parts."""
        return StratifiedSampler(
            **{one.name: getattr(self, one.name) for one in fields(self)}
        )

    def weight(self, sigma: Tensor) -> Tensor:
        """Return (batch,) fp32 loss weights.

        'bsmntw' is exp(-2 ((t - 500) / 1000)^2), shifted and scaled so that the least on
        the table is 0 and the mean 1.
        """
        if self.weighting == "none":
            return torch.ones_like(sigma)
        least, scale = self._least_and_scale
        return (_bsmntw_weight(sigma) - least) * scale

    @cached_property
    def _least_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the least weight on the table, and what makes the mean 1."""
        table = _bsmntw_weight(self.schedule.table)
        least = table.min()
        return least, 1 / (table - least).mean()

    def _index(self, fraction: float) -> int:
        return min(int(fraction * TRAIN_TIMESTEPS), TRAIN_TIMESTEPS - 1)

    def _density(self, rng: Rng) -> Tensor:
        """Return (batch,) fractions of the range, in [0, 1).

        Esser et al. 2024, section 3.1 (logit-normal with m=0, s=1; mode with s=1.29).
        """
        if self.sampling == "logit_normal":
            return 1 - torch.sigmoid(rng.normal("timestep"))
        u = rng.uniform("timestep")
        if self.sampling == "mode":
            bend = torch.cos(math.pi * u / 2) ** 2 - 1 + u
            return (u + 1.29 * bend).clamp(0, 1)
        return u


@dataclass(frozen=True)
class StratifiedSampler(TimestepSampler):
    """A distribution of sigmas in `STRATA` parts of equal probability: which of them a
    draw is from, is the `repeat` of its key; 0 has the least noise.

    A mean over all parts scatters far less than one over free draws.
    """

    def draw(self, rng: Rng) -> Tensor:
        """Return (batch,) fp32 sigmas, one per sample."""
        # These go through the table from its noisy end.
        descending = self.sampling in ("shifted", "mode")
        return super().draw(_StratumRng(rng, descending)).float()


class _StratumRng(Rng):
    """Random numbers from a part of their distribution, in float64."""

    def __init__(self, rng: Rng, descending: bool) -> None:
        super().__init__(rng.keys, rng.scope)
        self.descending = descending

    def uniform(self, stream: str, shape: Sequence[int] = ()) -> Tensor:
        strata = torch.tensor([key.repeat for key in self.keys], dtype=torch.float64)
        part = (strata + super().uniform(stream, shape)) / STRATA
        return 1 - part if self.descending else part

    def normal(self, stream: str, shape: Sequence[int] = ()) -> Tensor:
        numbers: Tensor = torch.special.ndtri(self.uniform(stream, shape))
        return numbers


def _bsmntw_weight(sigma: Tensor) -> Tensor:
    return torch.exp(-2 * (sigma - 0.5) ** 2)
