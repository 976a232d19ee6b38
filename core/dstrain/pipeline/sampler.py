"""Draw noise, and integrate from it, or a noisy image, to latents by Euler's rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph import ConstrainLatents
from dstrain.graph.noise_schedule import (
    TRAIN_TIMESTEPS,
    FlowMatchSchedule,
    LatentConstraint,
    Velocity,
)
from dstrain.pipeline.start_image import STRENGTH

NOISE_DEVICE = "cpu"
"""Where initial noise is drawn by default: the same numbers on every machine."""
OnStep = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class SamplerOptions:
    """The options of the sampler."""

    num_inference_steps: int
    guidance_scale: float = 1.0
    """1 is no guidance."""
    seed: int = 0
    """The seed of the initial noise."""
    latents: Tensor | None = None
    """The initial noise itself, in place of a seed."""
    on_step: OnStep | None = None
    """Called after each step with its index and the constrained latents."""
    rand_device: str = NOISE_DEVICE
    """The device that draws the initial noise."""
    denoising_strength: float | None = None
    """Share of the steps that are taken, above 0 and at most 1, from the input image or
    video, as noisy as it is where they begin; None starts from noise alone."""

    def __post_init__(self) -> None:
        strength = self.denoising_strength
        if strength is None:
            return
        if not 0 < strength <= 1:
            what = f"expected a number above 0 and at most 1, got {strength}"
            raise UsageError(STRENGTH, what)
        if not self.steps_taken:
            what = f"{strength} leaves none of {self.num_inference_steps} steps"
            raise UsageError(STRENGTH, what)

    @property
    def first_step(self) -> int:
        """Return the index of the first step taken, as diffusers' pipelines do."""
        if self.denoising_strength is None:
            return 0
        steps = self.num_inference_steps
        return int(steps - steps * self.denoising_strength)

    @property
    def steps_taken(self) -> int:
        """Return how many of the schedule's steps are taken."""
        return self.num_inference_steps - self.first_step


def integrate(
    schedule: FlowMatchSchedule,
    constrain_latents: ConstrainLatents,
    velocity: Velocity,
    noise: Tensor,
    steps: int,
    on_step: OnStep | None = None,
    start: tuple[Tensor, int] | None = None,
) -> LatentConstraint:
    """Step from noise, (batch, channels, ...) fp32, to the last latents, with the loss
    mask; gradients are kept where the caller keeps them.

    Args:
        schedule: The sigmas.
        constrain_latents: What the variant keeps fixed at each step.
        velocity: (latents, timestep) -> the prediction of noise - x_0.
        noise: The initial noise.
        steps: The number of steps of the schedule.
        on_step: Called after each step with its index, from 0 for the first that is
            taken, and the constrained latents.
        start: Latents without noise that it starts from, shaped as the noise, and the index
            of the first step; None starts from noise alone.
    """
    sigmas = inference_sigmas(schedule, noise, steps)

    def constrained_at(latents: Tensor, sigma: Tensor) -> LatentConstraint:
        timestep = (sigma * TRAIN_TIMESTEPS).expand(len(latents)).to(noise.device)
        return constrain_latents(latents, timestep, noise)

    first, latents = 0, noise
    if start is not None:
        clean, first = start
        latents = sigmas[first] * noise + (1 - sigmas[first]) * clean
    constrained = constrained_at(latents, sigmas[first])
    for i in range(first, steps):
        prediction = velocity(constrained.latents, constrained.timestep).float()
        latents = constrained.latents + (sigmas[i + 1] - sigmas[i]) * prediction
        constrained = constrained_at(latents, sigmas[i + 1])
        if on_step is not None:
            on_step(i - first, constrained.latents)
    return constrained


def inference_sigmas(
    schedule: FlowMatchSchedule, latents: Tensor, steps: int
) -> Tensor:
    """Return (steps + 1,) fp32 sigmas for such latents, (batch, channels, ...)."""
    return schedule.sigmas(steps, schedule.tokens(latents.shape))


def check_noise(noise: object, shape: Sequence[int]) -> Tensor:
    """Return the given initial noise; raises UsageError unless it has this shape."""
    got = list(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
    if got != list(shape):
        what = f"expected a tensor of shape {list(shape)}, got {got}"
        raise UsageError("latents", what)
    assert isinstance(noise, Tensor)
    return noise


def seeded_noise(shape: Sequence[int], seed: int, device: str = NOISE_DEVICE) -> Tensor:
    """Draw the fp32 noise of one sample on a device; other kinds of device draw other
    numbers. Raises UsageError if there is no such device.
    """
    name = device.strip() or NOISE_DEVICE
    try:
        generator = torch.Generator(name).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        what = f"noise cannot be drawn on device {name!r} here; another device gives different noise for the same seed"
        raise UsageError("rand_device", what) from error
