"""Define the flow-matching noise schedule that sampling and training share.

x_t = (1 - sigma) x_0 + sigma noise, target = noise - x_0, sigma = timestep / 1000
(Lipman et al. 2023, "Flow Matching for Generative Modeling"; the shift is that of Esser
et al. 2024, "Scaling Rectified Flow Transformers").
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dstrain.errors import UsageError

TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class FlowMatchSchedule:
    """Parameters of a family's noise schedule. All sigmas are fp32 and descend from 1."""

    shift: float | None = None
    """Factor k of sigma' = k sigma / (1 + (k - 1) sigma); None for the exponential form,
    whose mu grows linearly from `base_mu` at `base_tokens` to `max_mu` at `max_tokens`.
    """
    base_mu: float | None = None
    """None stands for 0.5."""
    max_mu: float | None = None
    """None stands for 1.15."""
    base_tokens: int = 256
    max_tokens: int = 4096
    training_mu: float = 0.8
    """mu of the training table."""
    shift_terminal: float | None = None
    """Value that the last sigma of a schedule is stretched to; None leaves it."""
    sigma_min: float = 0.0
    """End of the training table."""
    latents_per_token: int = 4
    """Positions of the latents in one token of the denoiser."""
    unshifted_tokens: int | None = None
    """If given, inference has the shift sqrt(tokens of one image / this number) in place
    of mu's (Esser et al. 2024, equation 23)."""

    def __post_init__(self) -> None:
        if self.shift is not None and (self.base_mu, self.max_mu) != (None, None):
            what = "has both shift and base_mu or max_mu; expected one form of the schedule"
            raise UsageError("FlowMatchSchedule", what)

    def mu(self, tokens: int) -> float:
        """Return mu of the exponential shift for latents of this many tokens."""
        base_mu = 0.5 if self.base_mu is None else self.base_mu
        max_mu = 1.15 if self.max_mu is None else self.max_mu
        slope = (max_mu - base_mu) / (self.max_tokens - self.base_tokens)
        return tokens * slope + base_mu - slope * self.base_tokens

    def sigmas(self, steps: int, tokens: int) -> Tensor:
        """Return (steps + 1,) fp32 sigmas for inference, from 1 to a final 0; cast
        before the shift, as in diffusers' FlowMatchEulerDiscreteScheduler.
        """
        plain = np.linspace(1.0, 1.0 / steps, steps).astype(np.float32)
        if self.unshifted_tokens is None:
            shifted = self._shifted(plain, self.mu(tokens))
        else:
            factor = math.sqrt(tokens / self.unshifted_tokens)
            shifted = factor / (factor + (1 / plain - 1))
        return torch.cat([torch.from_numpy(shifted).float(), torch.zeros(1)])

    def tokens(self, shape: Sequence[int]) -> int:
        """Return the tokens of latents, (batch, channels, ..., height, width), that decide
        the shift.
        """
        sides = shape[2:] if self.unshifted_tokens is None else shape[-2:]
        return math.prod(sides) // self.latents_per_token

    @cached_property
    def table(self) -> Tensor:
        """Return the (1000,) fp32 sigmas that training draws from, descending from 1."""
        # A table that ends at 0 leaves out the 0 itself, which has no noise.
        steps = TRAIN_TIMESTEPS + (self.sigma_min == 0.0)
        plain = np.linspace(1.0, self.sigma_min, steps)[:TRAIN_TIMESTEPS]
        shifted = self._shifted(plain, self.training_mu)
        return torch.from_numpy(shifted.astype(np.float32))

    def boundary_fraction(self, timestep: float) -> float:
        """Return the fraction of the training table at or above a timestep (0 to 1000)."""
        sigma = timestep / TRAIN_TIMESTEPS
        return int((self.table >= sigma).sum()) / TRAIN_TIMESTEPS

    def _shifted(self, sigmas: NDArray[np.floating], mu: float) -> NDArray[np.floating]:
        if self.shift is not None:
            stretch = 1 + (self.shift - 1) * sigmas
            return self.shift * sigmas / stretch
        factor = math.exp(mu)
        odds = 1 / sigmas - 1
        shifted = factor / (factor + odds)
        if self.shift_terminal is None or len(sigmas) == 1:
            return shifted
        # Stretch 1 - sigma, so that the first sigma stays 1.
        rest = 1 - shifted
        scale: np.floating = rest[-1] / (1 - self.shift_terminal)
        return 1 - rest / scale


class LatentConstraint(NamedTuple):
    """Result of a variant's `constrain_latents`."""

    latents: Tensor
    """Latents with the fixed parts in place."""
    timestep: Tensor
    """(batch,), or broadcastable to the latents if parts of a sample have their own."""
    mask: Tensor | None = None
    """Part of the latents that the loss counts, broadcastable to them; None for all."""


ConstrainLatents = Callable[[Tensor, Tensor, Tensor], LatentConstraint]
Velocity = Callable[[Tensor, Tensor], Tensor]
"""(latents, timestep) -> prediction of one branch."""


def constrain_nothing(
    latents: Tensor, timestep: Tensor, noise: Tensor
) -> LatentConstraint:
    """Return the latents as they are: what a variant without `constrain_latents` does."""
    return LatentConstraint(latents, timestep)
