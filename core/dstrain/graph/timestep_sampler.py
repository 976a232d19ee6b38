"""Draw the levels of noise that training steps use, and weight their losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.noise_process import MIN_SNR_GAMMA, TRAIN_TIMESTEPS, NoiseProcess
from dstrain.randomness import Rng

SAMPLINGS = ("shifted", "logit_normal", "mode", "uniform", "sigmoid")
NORMAL = ("logit_normal", "sigmoid")
"""Distributions of a normal through the logistic function."""
STRATA = 4
"""Parts of the distribution of timesteps that validation draws from one by one."""


@dataclass(frozen=True)
class TimestepSampler:
    """Distribution of the levels that a training run draws, and their loss weights."""

    schedule: NoiseProcess
    sampling: str = "shifted"
    """One of those of --timestep_sampling."""
    weighting: str = "bsmntw"
    """One of those of --loss_weighting."""
    min_boundary: float = 0.0
    """Start of the range that is trained, as a fraction of the table (0 = noisiest)."""
    max_boundary: float = 1.0
    """End of that range."""
    mean: float = 0.0
    """Mean of the normal of 'logit_normal' and 'sigmoid'."""
    std: float = 1.0
    """Its standard deviation."""
    min_snr_gamma: float = MIN_SNR_GAMMA

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_boundary < self.max_boundary <= 1.0:
            bounds = f"{self.min_boundary} and {self.max_boundary}"
            what = f"expected 0 <= min < max <= 1, got {bounds}"
            raise UsageError("--min_timestep_boundary", what)
        if self.sampling not in SAMPLINGS:
            what = f"{self.sampling!r} is none of {', '.join(SAMPLINGS)}"
            raise UsageError("--timestep_sampling", what)
        # Of a weighting that the process has not, it raises.
        self.weight(self.schedule.table[:1])

    @cached_property
    def is_continuous(self) -> bool:
        """Whether levels between those of the table are drawn."""
        unshifted = self.sampling in ("uniform", "sigmoid")
        return unshifted and self.schedule.is_continuous

    def draw(self, rng: Rng) -> Tensor:
        """Return (batch,) fp32 levels, one per sample."""
        if self.is_continuous:
            top = self.schedule.table[self._index(self.min_boundary)]
            bottom = self.schedule.table[self._index(self.max_boundary)]
            is_even = self.sampling == "uniform"
            part = rng.uniform("timestep") if is_even else self._logistic(rng)
            drawn = bottom + (top - bottom) * part
            return drawn.clamp(min=self.schedule.table[self._last])
        span = self.max_boundary - self.min_boundary
        # In Python floats, whose rounding decides the index.
        density = self._density(rng).tolist()
        indices = [
            min(self._index(self.min_boundary + part * span), self._last)
            for part in density
        ]
        # Numpy picks them in an eighth of torch's time.
        return torch.from_numpy(self.schedule.table.numpy()[indices])

    def stratified(self) -> "StratifiedSampler":
        """Return the sampler of the same distribution in equal parts."""
        return StratifiedSampler(
            **{one.name: getattr(self, one.name) for one in fields(self)}
        )

    def weight(self, level: Tensor) -> Tensor:
        """Return the (batch,) fp32 weights of losses at levels."""
        return self.schedule.weight(level, self.weighting, self.min_snr_gamma)

    @cached_property
    def _last(self) -> int:
        """Return the index of the last level of the range: that at its end is the first
        of what may be another expert's.
        """
        return max(
            math.ceil(self.max_boundary * TRAIN_TIMESTEPS) - 1,
            self._index(self.min_boundary),
        )

    def _index(self, fraction: float) -> int:
        return min(int(fraction * TRAIN_TIMESTEPS), TRAIN_TIMESTEPS - 1)

    def _logistic(self, rng: Rng) -> Tensor:
        """Return (batch,) logit-normal numbers; the larger, the noisier."""
        return torch.sigmoid(self.mean + self.std * rng.normal("timestep"))

    def _density(self, rng: Rng) -> Tensor:
        """Return (batch,) fractions of the range, in [0, 1).

        Esser et al. 2024, section 3.1 (logit-normal; mode with s=1.29).
        """
        if self.sampling in NORMAL:
            return 1 - self._logistic(rng)
        u = rng.uniform("timestep")
        if self.sampling == "mode":
            bend = torch.cos(math.pi * u / 2) ** 2 - 1 + u
            return (u + 1.29 * bend).clamp(0, 1)
        return u


@dataclass(frozen=True)
class StratifiedSampler(TimestepSampler):
    """A distribution of levels in `STRATA` parts of equal probability: which of them a
    draw is from, is the `repeat` of its key; 0 has the least noise.

    A mean over all parts scatters far less than one over free draws.
    """

    def draw(self, rng: Rng) -> Tensor:
        """Return (batch,) fp32 levels, one per sample."""
        # These go through the table from its noisy end.
        descending = not self.is_continuous and self.sampling not in NORMAL
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
