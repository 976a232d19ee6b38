"""Train a student, by direct distillation, to end its few sampling steps where a
teacher's image is.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.inputs import Column
from dstrain.graph.task import Task
from dstrain.pipeline.sampling import NOISE_DEVICE, seeded_noise
from dstrain.training.losses import SFT, Sampler, mean_square


def direct_distill(
    predict: Callable[..., Tensor],
    input_latents: Tensor,
    num_inference_steps: int,
    seed: list[int],
    rand_device: list[str] | None = None,
    *,
    sampler: Sampler,
) -> Tensor:
    """Return the mean square per sample of the student's final latents minus those of
    the teacher's image: (batch,) fp32.

    Each sample starts from the noise that inference draws from its `seed`. All steps
    are run with gradients and without guidance. What the variant keeps fixed is masked
    out.

    input_latents: (batch, channels, ...).
    """
    devices = rand_device or [NOISE_DEVICE] * len(seed)
    shape = (1, *input_latents.shape[1:])
    noises = []
    for sample_seed, device in zip(seed, devices, strict=True):
        noise = seeded_noise(shape, sample_seed, device)
        noises.append(noise.to(input_latents.device))
    final = sampler(predict, torch.cat(noises), num_inference_steps)
    return mean_square(final.latents - input_latents, final.mask)


def _check_steps(steps: int) -> str:
    return "" if steps >= 1 else f"want 1 step or more, got {steps}"


def _check_seed(seed: int) -> str:
    return "" if seed >= 0 else f"want a seed of 0 or more, got {seed}"


def _check_device(device: str) -> str:
    try:
        seeded_noise((1,), 0, device)
    except UsageError as error:
        return error.what
    return ""


def _check_scale(scale: float) -> str:
    if scale == 1:
        return ""
    return f"want 1 or a blank cell, got {scale:g}: the student runs without guidance"


NOISE_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "seed": Column("seed", "integer", check=_check_seed),
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
            "num_inference_steps", "integer", same_in_batch=True, check=_check_steps
        ),
        "cfg_scale": Column("cfg_scale", "number", check=_check_scale),
    },
)
OWN_TASKS: Mapping[str, Task] = MappingProxyType(
    {task.name: task for task in (SFT, DIRECT_DISTILL)}
)
"""The built-in tasks by name."""
