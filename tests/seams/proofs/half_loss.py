"""A task: flow matching whose rows count as a column of their own says."""

from typing import Any

import torch
from dstrain.plugin import Column, Task, between, hookimpl
from torch import Tensor

api = 2


def weighted(
    predict: Any,
    input_latents: Tensor,
    importance: list[float],
    *,
    timestep_sampler: Any,
    rng: Any,
) -> Tensor:
    """Return the weighted squared error of each sample: (batch,)."""
    sigma = timestep_sampler.draw(rng).to(input_latents.device)
    noise = rng.normal("noise", input_latents.shape[1:]).to(input_latents.device)
    level = sigma.view(-1, *[1] * (input_latents.ndim - 1))
    found = predict((1 - level) * input_latents + level * noise, sigma * 1000)
    error = (found.float() - (noise - input_latents)).square().flatten(1).mean(1)
    return error * torch.tensor(importance, device=error.device)


IMPORTANCE = Column("importance", "number", check=between(0, 1))


@hookimpl
def dstrain_tasks() -> list[Task]:
    return [Task.of("weighted", weighted, inputs={"importance": IMPORTANCE})]
