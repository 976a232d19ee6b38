"""Train a student, by direct distillation, to end its few sampling steps where a
teacher's image is.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, at_least
from dstrain.graph.task import Task
from dstrain.pipeline.sampling import NOISE_DEVICE, seeded_noise
from dstrain.training.losses import SFT, Sampler, mean_square


def direct_distill(
    predict: Callable[..., Tensor],
    input_latents: Tensor,
    num_inference_steps: int,
    seed: list[int],
    rand_device: list[str] | None = None,
    loss_weight: Tensor | None = None,
    *,
    sampler: Sampler,
) -> Tensor:
    """Return the mean square per sample of the student's final latents minus those of
    the teacher's image: (batch,) fp32.

    Each sample starts from the noise that inference draws from its `seed`. All steps
    are run with gradients and without guidance. What the variant keeps fixed is masked
    out.

    input_latents: (batch, channels, ...). loss_weight: as in `mean_square`.
    """
    devices = rand_device or [NOISE_DEVICE] * len(seed)
    shape = (1, *input_latents.shape[1:])
    noises = []
    for own_seed, device in zip(seed, devices, strict=True):
        noise = seeded_noise(shape, own_seed, device)
        noises.append(noise.to(input_latents.device))
    final = sampler(predict, torch.cat(noises), num_inference_steps)
    return mean_square(final.latents - input_latents, final.mask, loss_weight)


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
        f"expected 1 or a blank cell, got {scale:g}: the student runs without guidance"
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
OWN_TASKS = MappingProxyType({"sft": SFT, "direct_distill": DIRECT_DISTILL})
"""The built-in tasks by name."""
