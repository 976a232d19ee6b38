"""Say how data becomes noise, and what a denoiser predicts of it: what training and
sampling share.

x_t = s x_0 + n noise, where a level decides the factors s and n.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dstrain.errors import UsageError

EULER = "euler"
"""The sampler that all that are trained by flow matching have."""
TRAIN_TIMESTEPS = 1000
MIN_SNR_GAMMA = 5.0
"""The signal-to-noise ratio from which `min_snr` weighs no more (Hang et al. 2023)."""
Betas = Literal["linear", "scaled_linear", "cosine"]
Prediction = Literal["velocity", "epsilon", "v", "x_0"]
"""What a denoiser predicts: velocity is noise - x_0 (Lipman et al. 2023), epsilon the
noise (Ho et al. 2020), v is s noise - n x_0 (Salimans and Ho 2022).
"""


class NoiseProcess(ABC):
    """What a variant says once of its noise. A process that predicts something else
    overrides `target` and `weight`.

    Levels are fp32. Those that go with latents, (batch, channels, ...), broadcast over
    them.
    """

    @property
    @abstractmethod
    def predicts(self) -> Prediction:
        """Return what the denoiser predicts."""

    training_defaults: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"timestep_sampling": "uniform", "loss_weighting": "none"}
    )
    """Options of training that a variant's users leave out -> their values."""
    is_continuous: ClassVar[bool] = False
    """Whether there are levels between those of the table."""

    @property
    @abstractmethod
    def table(self) -> Tensor:
        """Return the (1000,) levels that training draws from, the noisiest first."""

    @abstractmethod
    def timestep(self, level: Tensor) -> Tensor:
        """Return what the denoiser is told of levels, 0 to 1000."""

    @abstractmethod
    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors s of data and n of noise at levels."""

    def mix(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return data as noisy as levels say."""
        of_data, of_noise = self.factors(level)
        return of_data * clean + of_noise * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return what the denoiser should predict of such a mixture."""
        if self.predicts == "velocity":
            return noise - clean
        if self.predicts == "v":
            of_data, of_noise = self.factors(level)
            return of_data * noise - of_noise * clean
        return noise if self.predicts == "epsilon" else clean

    def weight(
        self, level: Tensor, weighting: str, gamma: float = MIN_SNR_GAMMA
    ) -> Tensor:
        """Return the (batch,) fp32 weights of losses at levels; raises UsageError for a
        weighting that this process has not.

        'min_snr' weighs the square error of x_0 that follows from a prediction by
        min(s^2 / n^2, gamma) (Hang et al. 2023, "Efficient Diffusion Training via Min-SNR
        Weighting Strategy").
        """
        if weighting == "none":
            return torch.ones_like(level)
        if weighting != "min_snr":
            what = f"{weighting} is a weighting of flow matching alone"
            raise UsageError("--loss_weighting", what, "use none or min_snr")
        of_data, of_noise = self.factors(level)
        snr = (of_data / of_noise).square()
        # s^2 / n^2 times the square of what makes an error of x_0 of one of the prediction
        unlimited = {
            "velocity": (of_data / (of_data + of_noise)).square(),
            "epsilon": torch.ones_like(snr),
            "v": of_data.square(),
            "x_0": snr,
        }
        return unlimited[self.predicts] / (snr / gamma).clamp(min=1)

    def shifted(self, shift: float) -> "NoiseProcess":
        """Return the process with another shift of the training table; raises UsageError
        for one that has none.
        """
        what = f"has no effect: {type(self).__name__} has no shift"
        raise UsageError("--timestep_shift", what)

    def tokens(self, shape: Sequence[int]) -> int:
        """Return the tokens of latents, (batch, channels, ..., height, width), that decide
        the levels of inference.
        """
        return math.prod(shape[2:])

    def boundary_fraction(self, timestep: float) -> float:
        """Return the fraction of the training table at or above a timestep (0 to 1000)."""
        at_or_above = self.timestep(self.table) >= timestep
        return int(at_or_above.sum()) / TRAIN_TIMESTEPS


class Sampler(Protocol):
    """Goes from noise to data in one run of inference; it may remember its steps."""

    timesteps: Tensor
    """(steps + 1,) fp32: what the denoiser is told at each step, and a final 0."""

    def start(self, noise: Tensor, clean: Tensor | None, first: int) -> Tensor:
        """Return the latents at a step: made of noise, or of data and noise."""
        ...

    def scale(self, latents: Tensor, index: int) -> Tensor:
        """Return the latents of a step as the denoiser expects them."""
        ...

    def step(self, prediction: Tensor, latents: Tensor, index: int) -> Tensor:
        """Return the latents after a step."""
        ...


MakeSampler = Callable[[NoiseProcess, int, int, torch.Generator], Sampler]
"""(process, steps, tokens, generator of the noise that it adds) -> a sampler."""


@dataclass(frozen=True)
class FlowMatchSchedule(NoiseProcess):
    """Flow matching: s = 1 - sigma and n = sigma = timestep / 1000 (Lipman et al. 2023,
    "Flow Matching for Generative Modeling"; the shift is that of Esser et al. 2024,
    "Scaling Rectified Flow Transformers"). Its levels are sigmas, which descend from 1.
    """

    training_defaults: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"timestep_sampling": "shifted", "loss_weighting": "bsmntw"}
    )
    is_continuous: ClassVar[bool] = True
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

    @property
    def predicts(self) -> Prediction:
        """Return velocity."""
        return "velocity"

    def timestep(self, level: Tensor) -> Tensor:
        """Return 1000 sigma."""
        return level * TRAIN_TIMESTEPS

    def shifted(self, shift: float) -> "FlowMatchSchedule":
        """Return it with a shift of this factor."""
        return replace(self, shift=shift, base_mu=None, max_mu=None)

    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 - sigma and sigma."""
        return 1 - level, level

    def weight(
        self, level: Tensor, weighting: str, gamma: float = MIN_SNR_GAMMA
    ) -> Tensor:
        """Return the (batch,) fp32 weights of losses at sigmas.

        'bsmntw' is exp(-2 ((t - 500) / 1000)^2), shifted and scaled so that the least on
        the table is 0 and the mean 1.
        """
        if weighting != "bsmntw":
            return super().weight(level, weighting, gamma)
        least, scale = self._least_and_scale
        return (_bsmntw_weight(level) - least) * scale

    @cached_property
    def _least_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the least weight on the table, and what makes the mean 1."""
        table = _bsmntw_weight(self.table)
        least = table.min()
        return least, 1 / (table - least).mean()

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


def _bsmntw_weight(sigma: Tensor) -> Tensor:
    return torch.exp(-2 * (sigma - 0.5) ** 2)


@dataclass(frozen=True)
class Diffusion(NoiseProcess):
    """Diffusion in 1000 steps: s^2 is the product of 1 - beta up to a timestep, and
    s^2 + n^2 = 1 (Ho et al. 2020, "Denoising Diffusion Probabilistic Models"). Its levels
    are timesteps, 999 to 0.
    """

    predicts: Prediction = "epsilon"
    betas: Betas = "scaled_linear"
    """How beta grows: evenly, its root evenly (Rombach et al. 2022), or so that s is a
    cosine (Nichol and Dhariwal 2021).
    """
    beta_start: float = 0.00085
    """The first beta, but of the cosine."""
    beta_end: float = 0.012
    """The last one."""
    zero_terminal_snr: bool = False
    """Whether s is 0 at the last timestep (Lin et al. 2024, algorithm 1). Nothing can be
    learned there of epsilon.
    """

    def __post_init__(self) -> None:
        for value, kind in ((self.predicts, Prediction), (self.betas, Betas)):
            if value not in get_args(kind):
                what = f"{value!r} is none of {', '.join(get_args(kind))}"
                raise UsageError("Diffusion", what)

    @cached_property
    def table(self) -> Tensor:
        """Return the (1000,) timesteps that training draws from."""
        return torch.arange(TRAIN_TIMESTEPS - 1, -1, -1, dtype=torch.float32)

    def timestep(self, level: Tensor) -> Tensor:
        """Return the levels, which are timesteps."""
        return level

    def factors(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and n at timesteps."""
        squares = self._squares.to(level.device)[level.long()]
        return squares.sqrt(), (1 - squares).sqrt()

    @cached_property
    def _squares(self) -> Tensor:
        """Return (1000,) fp32 s^2, from timestep 0 on."""
        count = TRAIN_TIMESTEPS
        if self.betas == "cosine":
            ends = (
                np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * np.pi / 2) ** 2
            )
            betas = np.minimum(1 - ends[1:] / ends[:-1], 0.999)
        elif self.betas == "linear":
            betas = np.linspace(self.beta_start, self.beta_end, count)
        else:
            roots = math.sqrt(self.beta_start), math.sqrt(self.beta_end)
            betas = np.linspace(*roots, count) ** 2
        squares = np.cumprod(1 - betas)
        if self.zero_terminal_snr:
            factors = np.sqrt(squares)
            first, last = factors[0], factors[-1]
            squares = ((factors - last) * first / (first - last)) ** 2
        return torch.from_numpy(squares.astype(np.float32))


class LatentConstraint(NamedTuple):
    """Result of a variant's `constrain_latents`."""

    latents: Tensor
    """Latents with the fixed parts in place."""
    timestep: Tensor
    """(batch,), or broadcastable to the latents if parts of a sample have their own."""
    mask: Tensor | None = None
    """Part of the latents that the loss counts, broadcastable to them; None for all."""


ConstrainLatents = Callable[[Tensor, Tensor, Tensor], LatentConstraint]
Denoise = Callable[[Tensor, Tensor], Tensor]
"""(latents, timestep) -> prediction."""


def constrain_nothing(
    latents: Tensor, timestep: Tensor, noise: Tensor
) -> LatentConstraint:
    """Return the latents as they are: what a variant without `constrain_latents` does."""
    return LatentConstraint(latents, timestep)
