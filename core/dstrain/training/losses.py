"""Compute losses, one number per sample, from `predict` and the values they read."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph import POSITIVE, ConstrainLatents, Task
from dstrain.graph.noise_schedule import TRAIN_TIMESTEPS, LatentConstraint, Velocity
from dstrain.graph.timestep_sampler import TimestepSampler
from dstrain.randomness import Rng


class Predict(Protocol):
    """What a loss calls: the denoiser with the conditions of a batch."""

    def __call__(
        self, noisy_latents: Tensor, timestep: Tensor, branch: str = POSITIVE, /
    ) -> Tensor:
        """Return the prediction, shaped as the latents; timestep is (batch,), 0 to
        1000, or one per token.
        """
        ...


Sampler = Callable[[Velocity, Tensor, int], LatentConstraint]
"""(velocity, noise, steps) -> the sampler's final latents, with gradients; see
`dstrain.pipeline.sampling.integrate`.
"""
InferenceSigmas = Callable[[Tensor, int], Tensor]
"""(latents, steps) -> the (steps + 1,) sigmas of the sampler for latents of this size."""


def flow_match(
    predict: Predict,
    input_latents: Tensor,
    loss_weight: Tensor | None = None,
    *,
    timestep_sampler: TimestepSampler,
    constrain_latents: ConstrainLatents,
    rng: Rng,
) -> Tensor:
    """Return the weighted mean square of (prediction - (noise - x_0)) per sample:
    (batch,) fp32.

    input_latents: (batch, channels, ...). Noise and timesteps are fp32, drawn on the
    CPU per sample. loss_weight: as in `mean_square`.
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
    return weight * mean_square(error, constrained.mask, loss_weight)


def mean_square(
    error: Tensor, mask: Tensor | None, loss_weight: Tensor | None = None
) -> Tensor:
    """Return the mean square of each sample's error where the mask is 1: (batch,).

    Args:
        error: (batch, channels, ..., latent height, latent width).
        mask: Broadcasts over the error; None for all.
        loss_weight: How much each position counts in the mean, (batch, 1, ..., latent
            height, latent width); None for all alike. Of a sample of which nothing counts
            the loss is 0, and so is its gradient.

    Raises UsageError for weights of another height and width.
    """
    square = error.square()
    if loss_weight is not None:
        square = square * _relative(loss_weight, mask, error)
    if mask is None:
        return square.flatten(1).mean(1)
    mask = mask.expand_as(square)
    return (square * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)


def _relative(loss_weight: Tensor, mask: Tensor | None, error: Tensor) -> Tensor:
    """Return weights divided by their mean where the mask is 1: equal ones are exactly
    1, and change no bit.
    """
    if loss_weight.shape[-2:] != error.shape[-2:]:
        sizes = f"{list(loss_weight.shape)}, and the latents are {list(error.shape)}"
        what = f"is {sizes}: latent_shape of the variant says something else than its encoder"
        raise UsageError("loss_weight", what)
    counted = torch.ones_like(loss_weight)
    if mask is not None:
        counted = counted * mask
    total = (counted * loss_weight).flatten(1).sum(1)
    mean = total / counted.flatten(1).sum(1)
    # Weights that are 0 wherever the mask is 1 stay so: 0 / 0 would be no number.
    mean = torch.where(total == 0, 1.0, mean)
    return loss_weight / mean.view(-1, *[1] * (loss_weight.ndim - 1))


SFT = Task.of("sft", flow_match)
