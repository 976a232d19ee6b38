"""Direct distillation: a student's whole sampler, at few steps, learns to end where a
teacher's picture is.
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
    """Mean square per sample of (the student's final latents - the teacher's picture in
    latent space): (batch,) fp32.

    input_latents: (batch, channels, ...). Each sample starts from the noise that
    inference draws from its `seed`; all its steps are run with gradients, without
    guidance. What the variant holds fixed is masked out.
    """
    devices = rand_device or [NOISE_DEVICE] * len(seed)
    shape = (1, *input_latents.shape[1:])
    noise = [
        seeded_noise(shape, one, device)
        for one, device in zip(seed, devices, strict=True)
    ]
    constrained = sampler(
        predict,
        torch.cat([one.to(input_latents.device) for one in noise]),
        num_inference_steps,
    )
    return mean_square(constrained.latents - input_latents, constrained.mask)


def _why_no_steps(steps: int) -> str:
    return "" if steps >= 1 else f"want 1 step or more, got {steps}"


def _why_no_seed(seed: int) -> str:
    return "" if seed >= 0 else f"want a seed of 0 or more, got {seed}"


def _why_no_noise(device: str) -> str:
    try:
        seeded_noise((1,), 0, device)
    except UsageError as error:
        return error.what
    return ""


def _why_no_guidance(scale: float) -> str:
    return (
        ""
        if scale == 1
        else f"want 1 or a blank cell, got {scale:g}: the student runs without guidance"
    )


NOISE_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "seed": Column("seed", "integer", check=_why_no_seed),
        "rand_device": Column("rand_device", check=_why_no_noise),
    }
)
"""What a row's initial noise is drawn from."""
DIRECT_DISTILL = Task.of(
    "direct_distill",
    direct_distill,
    inputs={
        **NOISE_COLUMNS,
        "num_inference_steps": Column(
            "num_inference_steps", "integer", same_in_batch=True, check=_why_no_steps
        ),
        "cfg_scale": Column("cfg_scale", "number", check=_why_no_guidance),
    },
)
OWN_TASKS: Mapping[str, Task] = MappingProxyType(
    {task.name: task for task in (SFT, DIRECT_DISTILL)}
)
"""Every task of dstrain's own, by name."""
