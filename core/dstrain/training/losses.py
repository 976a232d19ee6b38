"""Compute losses, one number per sample, from `predict` and the values they read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph import POSITIVE, Column, ConstrainLatents, Task
from dstrain.graph.inputs import at_least
from dstrain.graph.noise_process import (
    TRAIN_TIMESTEPS,
    Denoise,
    LatentConstraint,
    NoiseProcess,
)
from dstrain.graph.timestep_sampler import TimestepSampler
from dstrain.pipeline import seeded_noise
from dstrain.pipeline.sampler import NOISE_DEVICE
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


Integrate = Callable[[Denoise, Tensor, int], LatentConstraint]
"""(denoise, noise, steps) -> the sampler's final latents, with gradients; see
`dstrain.pipeline.sampler.integrate`.
"""
InferenceSigmas = Callable[[Tensor, int], Tensor]
"""(latents, steps) -> the (steps + 1,) sigmas of the sampler for latents of this size."""


@dataclass(frozen=True)
class LossOptions:
    """How `sft` measures an error, and what it adds to the noise."""

    loss: str = "mse"
    """One of those of --loss."""
    delta: float = 0.1
    """Of 'huber': errors above it count no longer by their square."""
    schedule: str = "constant"
    """How delta depends on the level; one of those of --huber_schedule."""
    noise_offset: float = 0.0
    """Size of what is added to all noise of a channel (Guttenberg 2023, "Diffusion with
    Offset Noise").
    """
    input_perturbation: float = 0.0
    """Size of the noise that only the denoiser sees (Ning et al. 2023, "Input Perturbation
    Reduces Exposure Bias in Diffusion Models").
    """

    def noise(self, rng: Rng, shape: Sequence[int]) -> Tensor:
        """Draw noise for latents of this shape, (batch, channels, ...)."""
        noise = rng.normal("noise", shape[1:])
        if self.noise_offset:
            channels = (shape[1], *[1] * (len(shape) - 2))
            noise = noise + self.noise_offset * rng.normal("noise_offset", channels)
        return noise

    def perturbed(self, rng: Rng, noise: Tensor) -> Tensor:
        """Return the noise that the denoiser sees."""
        if not self.input_perturbation:
            return noise
        more = rng.normal("input_perturbation", noise.shape[1:]).to(noise.device)
        return noise + self.input_perturbation * more

    def measured(self, error: Tensor, process: NoiseProcess, level: Tensor) -> Tensor:
        """Return the loss of each number of an error.

        'huber' is 2 d (sqrt(e^2 + d^2) - d), which is e^2 near 0, with the d of Khrapov et
        al. 2024, "Improving Diffusion Models's Data-Corruption Resistance using Scheduled
        Pseudo-Huber Loss"; written so that small errors do not cancel in fp32.
        """
        if self.loss == "mse":
            return error.square()
        if self.loss == "mae":
            return error.abs()
        delta = torch.full_like(level, self.delta)
        if self.schedule == "exponential":
            delta = delta ** (process.timestep(level) / TRAIN_TIMESTEPS)
        if self.schedule == "snr":
            of_data, of_noise = process.factors(level)
            delta = delta + (1 - delta) * (of_data / (of_data + of_noise)).square()
        return 2 * delta * error.square() / (torch.hypot(error, delta) + delta)


PLAIN = LossOptions()


def flow_match(
    predict: Predict,
    input_latents: Tensor,
    loss_weight: Tensor | None = None,
    *,
    timestep_sampler: TimestepSampler,
    constrain_latents: ConstrainLatents,
    loss_options: LossOptions = PLAIN,
    rng: Rng,
) -> Tensor:
    """Return the weighted mean loss of (prediction - target) per sample: (batch,) fp32.

    input_latents: (batch, channels, ...). Noise and levels are fp32, drawn on the CPU per
    sample. What the target is, the variant's noise process says. loss_weight: as in
    `weighed_mean`.
    """
    process = timestep_sampler.schedule
    level = timestep_sampler.draw(rng)
    weight = timestep_sampler.weight(level)
    noise = loss_options.noise(rng, input_latents.shape).to(input_latents.device)
    weight = weight.to(noise.device)
    level = level.to(noise.device)
    timestep = process.timestep(level)
    # (batch, 1, ...): one level per sample, broadcast over its latents.
    level = level.view(-1, *[1] * (input_latents.ndim - 1))
    seen = loss_options.perturbed(rng, noise)
    noisy_latents = process.mix(input_latents, seen, level)
    constrained = constrain_latents(noisy_latents, timestep, seen)
    prediction = predict(constrained.latents, constrained.timestep).float()
    error = prediction - process.target(input_latents, noise, level)
    losses = loss_options.measured(error, process, level)
    return weight * weighed_mean(losses, constrained.mask, loss_weight)


def mean_square(
    error: Tensor, mask: Tensor | None, loss_weight: Tensor | None = None
) -> Tensor:
    """Return the mean square of each sample's error, as `weighed_mean`."""
    return weighed_mean(error.square(), mask, loss_weight)


def weighed_mean(
    losses: Tensor, mask: Tensor | None, loss_weight: Tensor | None = None
) -> Tensor:
    """Return the mean of each sample's losses where the mask is 1: (batch,).

    Args:
        losses: (batch, channels, ..., latent height, latent width).
        mask: Broadcasts over the losses; None for all.
        loss_weight: How much each position counts in the mean, (batch, 1, ..., latent
            height, latent width); None for all alike. Of a sample of which nothing counts
            the loss is 0, and so is its gradient.

    Raises UsageError for weights of another height and width.
    """
    if loss_weight is not None:
        losses = losses * _relative(loss_weight, mask, losses)
    if mask is None:
        return losses.flatten(1).mean(1)
    mask = mask.expand_as(losses)
    return (losses * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)


def _relative(loss_weight: Tensor, mask: Tensor | None, losses: Tensor) -> Tensor:
    """Return weights divided by their mean where the mask is 1: equal ones are exactly
    1, and change no bit.
    """
    if loss_weight.shape[-2:] != losses.shape[-2:]:
        sizes = f"{list(loss_weight.shape)}, and the latents are {list(losses.shape)}"
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


LATENTS, SIGMAS = "latents", "sigmas"
"""The tensors of a trajectory's file: (1, steps + 1, channels, ...) and (1, steps + 1),
both fp32, from the initial noise on."""
CLOSE = 1e-6
"""By how much sigmas may differ: another version of a library may round them differently."""


def direct_distill(
    predict: Callable[..., Tensor],
    input_latents: Tensor,
    num_inference_steps: int,
    seed: list[int],
    rand_device: list[str] | None = None,
    loss_weight: Tensor | None = None,
    *,
    sampler: Integrate,
) -> Tensor:
    """Return the mean square per sample of the student's final latents minus those of
    the teacher's image, `input_latents` (batch, channels, ...): (batch,) fp32.

    Each sample starts from the noise that inference draws from its `seed`. All steps
    are run with gradients and without guidance. What the variant keeps fixed is masked
    out.
    """
    devices = rand_device or [NOISE_DEVICE] * len(seed)
    shape = (1, *input_latents.shape[1:])
    noises = []
    for own_seed, device in zip(seed, devices, strict=True):
        noise = seeded_noise(shape, own_seed, device)
        noises.append(noise.to(input_latents.device))
    final = sampler(predict, torch.cat(noises), num_inference_steps)
    return mean_square(final.latents - input_latents, final.mask, loss_weight)


def trajectory_imitation(
    predict: Callable[..., Tensor],
    trajectory: list[Mapping[str, Tensor]],
    num_inference_steps: int,
    loss_weight: Tensor | None = None,
    *,
    constrain_latents: ConstrainLatents,
    inference_sigmas: InferenceSigmas,
) -> Tensor:
    """Return the mean square per sample, over the student's steps, of its velocity
    minus the one that leads from the teacher's latents at the beginning of the step to
    those at its end: (batch,) fp32.

    Every step begins at the teacher's latents, those of `trajectory` at its sigmas.
    What the variant keeps fixed is masked out. Raises UsageError for trajectories of
    another number of steps, or of other sigmas than those of the variant's sampler.
    """
    for one in trajectory:
        if not {LATENTS, SIGMAS} <= one.keys():
            what = f"is a file with {', '.join(one)}; expected {LATENTS} and {SIGMAS}"
            raise UsageError("trajectory", what, TRAJECTORY_ADVICE)
    path = torch.cat([one[LATENTS] for one in trajectory])
    noise = path[:, 0]
    sigmas = trajectory[0][SIGMAS][0]
    _check_sigmas(
        [one[SIGMAS][0] for one in trajectory],
        num_inference_steps,
        noise,
        inference_sigmas,
    )
    losses = []
    for step in range(num_inference_steps):
        timestep = (sigmas[step] * TRAIN_TIMESTEPS).expand(len(path))
        start = constrain_latents(path[:, step], timestep, noise)
        velocity = (path[:, step + 1] - start.latents) / (
            sigmas[step + 1] - sigmas[step]
        )
        prediction = predict(start.latents, start.timestep).float()
        losses.append(mean_square(prediction - velocity, start.mask, loss_weight))
    return torch.stack(losses).mean(0)


def _check_sigmas(
    found: list[Tensor], steps: int, latents: Tensor, inference_sigmas: InferenceSigmas
) -> None:
    wanted = inference_sigmas(latents, steps).to(latents.device)
    for sigmas in found:
        # Memory is planned with zeros of the same shape.
        if not sigmas.any():
            continue
        if len(sigmas) == len(wanted) and torch.allclose(sigmas, wanted, 0, CLOSE):
            continue
        found_here, sampled = (
            [round(one, 4) for one in row.tolist()] for row in (sigmas, wanted)
        )
        what = (
            f"has the latents at sigmas {found_here}, and those of {steps} steps of this "
            f"model's sampler are {sampled}"
        )
        raise UsageError("trajectory", what, TRAJECTORY_ADVICE)


def _check_device(device: str) -> str:
    try:
        seeded_noise((1,), 0, device)
    except UsageError as error:
        return error.what
    return ""


def _check_scale(scale: float) -> str:
    if scale == 1:
        return ""
    return (
        f"expected 1 or a blank value, got {scale:g}: the student runs without guidance; "
        "the teacher's is in its images"
    )


NOISE_COLUMNS = MappingProxyType(
    {
        "seed": Column("seed", "integer", check=at_least(0)),
        "rand_device": Column("rand_device", check=_check_device),
    }
)
"""Columns that decide a row's initial noise."""
DIRECT_DISTILL = Task.of(
    "direct_distill",
    direct_distill,
    inputs={
        **NOISE_COLUMNS,
        "num_inference_steps": Column(
            "num_inference_steps", "integer", same_in_batch=True, check=at_least(1)
        ),
        "cfg_scale": Column("cfg_scale", "number", check=_check_scale),
    },
)
TRAJECTORY_ADVICE = (
    "dstrain generate --dataset TABLE --trajectory makes a dataset with it"
)
TRAJECTORY_IMITATION = Task.of(
    "trajectory_imitation",
    trajectory_imitation,
    inputs={
        "trajectory": Column("trajectory", "tensors", advice=TRAJECTORY_ADVICE),
        "num_inference_steps": DIRECT_DISTILL.inputs["num_inference_steps"],
        "cfg_scale": DIRECT_DISTILL.inputs["cfg_scale"],
        # How the trajectory was made; the table may be that of direct distillation.
        "seed": Column("seed", "integer"),
        "rand_device": Column("rand_device"),
    },
)
OWN_TASKS = MappingProxyType(
    {task.name: task for task in (SFT, DIRECT_DISTILL, TRAJECTORY_IMITATION)}
)
"""The built-in tasks by name."""
