"""Programs: a pipeline spec of small networks, a task, what is trained, and rows of a dataset.

Every value is made from all that a unit was given, and read back in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from dstrain import Frames, Task, Trainables
from dstrain.plugin import Column, Measured, PipelineSpec
from PIL import Image
from torch import Tensor, nn

WIDTH = 4
NETS = ("dit", "net_a", "net_b", "net_c")
INPUTS = MappingProxyType(
    {
        "prompt": Column("prompt"),
        "negative_prompt": Column("negative"),
        "number": Column("number", "integer"),
        "picture": Column("image", "image"),
        "height": Measured("picture", "height"),
    }
)


class Net(nn.Module):
    """A residual network with dropout between its two layers: (batch, WIDTH) -> (batch,
    WIDTH).
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.drop(self.first(x).sin()))


def pixels(hidden: Tensor) -> Tensor:
    return (hidden.detach()[0].sigmoid() * 255).to(torch.uint8)


def read(value: Any) -> Tensor:
    """Any value -> (batch, WIDTH), or (1, WIDTH) where it is the same for a whole
    batch.
    """
    if isinstance(value, Tensor):
        return value.mean(1) if value.ndim == 3 else value
    if isinstance(value, str):
        return (
            torch.tensor(
                [[float(sum(map(ord, value[i::WIDTH]))) for i in range(WIDTH)]]
            )
            / 100
        )
    if isinstance(value, Frames):
        return read(Image.fromarray(value.pixels.numpy()[0])) + value.fps
    if isinstance(value, Image.Image):
        array = np.array(value).astype(np.float64)
        return torch.full((1, WIDTH), float(array.mean() + array.shape[0]) / 100)
    if isinstance(value, list | dict):
        parts = value if isinstance(value, list) else list(value.values())
        return torch.stack(
            torch.broadcast_tensors(
                *((i + 1) * read(part) for i, part in enumerate(parts))
            )
        ).sum(0)
    return torch.full(
        (1, WIDTH), float(value or 0) * (1 if isinstance(value, bool | float) else 1e-3)
    )


def blend(
    named: Mapping[str, Any], borrows: Sequence[str], start: Tensor | None = None
) -> Tensor:
    """All that a function was given, as (batch, WIDTH): its values, then each network
    in turn.
    """
    hidden = torch.ones(1, WIDTH) if start is None else start
    for i, name in enumerate(sorted(set(named) - set(borrows))):
        hidden = hidden + (i + 1) * read(named[name])
    hidden = hidden.sin()
    for name in borrows:
        if name in NETS:
            hidden = named[name](hidden)
    return hidden


def loss_body(
    borrows: tuple[str, ...],
    branches: tuple[str, ...],
    predict: Callable[..., Tensor],
    **named: Any,
) -> Tensor:
    rng, timestep_sampler, constrain_latents = (
        named.pop(name) for name in ("rng", "timestep_sampler", "constrain_latents")
    )
    sigma, noise = timestep_sampler.draw(rng), rng.normal("noise", (WIDTH,))
    clean = blend(named, borrows)
    held = constrain_latents(clean + sigma[:, None] * noise, sigma * 1000, noise)
    error = torch.stack(
        [
            (predict(held.latents, held.timestep, branch) - noise).square()
            for branch in branches
        ]
    )
    return timestep_sampler.weight(sigma) * error.sum(0).mean(1)


@dataclass(frozen=True)
class Program:
    spec: PipelineSpec
    task: Task
    trainables: Trainables
    dropouts: Mapping[str, float]
    rows: tuple[Mapping[str, str], ...]
    batch_size: int
