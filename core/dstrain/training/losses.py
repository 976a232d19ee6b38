"""Compute losses, one number per sample, from `predict` and the values they read."""

from collections.abc import Callable

from torch import Tensor

from dstrain.graph.noise_schedule import (
    TRAIN_TIMESTEPS,
    ConstrainLatents,
    LatentConstraint,
    TimestepSampler,
    Velocity,
)
from dstrain.graph.task import Task
from dstrain.randomness import Rng

Sampler = Callable[[Velocity, Tensor, int], LatentConstraint]
"""(velocity, noise, steps) -> the sampler's final latents, with gradients; see
`dstrain.pipeline.sampling.integrate`.
"""


def flow_match(
    predict: Callable[..., Tensor],
    input_latents: Tensor,
    *,
    timestep_sampler: TimestepSampler,
    constrain_latents: ConstrainLatents,
    rng: Rng,
) -> Tensor:
    """Return the weighted mean square of (prediction - (noise - x_0)) per sample:
    (batch,) fp32.

    input_latents: (batch, channels, ...). Noise and timesteps are fp32, drawn on the
    CPU per sample.
    """
    sigma = timestep_sampler.draw(rng)
    weight = timestep_sampler.weight(sigma)
    noise = rng.normal("noise", input_latents.shape[1:]).to(input_latents.device)
    weight = weight.to(noise.device)
    sigma = sigma.to(noise.device)
    # (batch, 1, ...): one level per sample, broadcast over its latents.
    ones = [1] * (input_latents.ndim - 1)
    level = sigma.view(-1, *ones)
    noisy_latents = (1 - level) * input_latents + level * noise
    constrained = constrain_latents(noisy_latents, sigma * TRAIN_TIMESTEPS, noise)
    prediction = predict(constrained.latents, constrained.timestep).float()
    error = prediction - (noise - input_latents)
    return weight * mean_square(error, constrained.mask)


def mean_square(error: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean square of each sample's error where the mask is 1: (batch,).

    mask: broadcasts over the error; None for all.
    """
    square = error.square()
    if mask is None:
        return square.flatten(1).mean(1)
    mask = mask.expand_as(square)
    return (square * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)


SFT = Task.of("sft", flow_match)
