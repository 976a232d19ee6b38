"""Random programs: a pipeline spec of small networks, a task, what is trained, and rows of a
dataset.

Every value is made from all that a unit was given, and read back in full, so that
nothing wrong goes unseen.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from dstrain import Frames, LoraConfig, Task, Trainables, UsageError
from dstrain.graph import FunctionSpec, Plan, make_plan
from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    LatentConstraint,
    Measured,
    PipelineSpec,
)
from PIL import Image
from torch import Tensor, nn

from tests.support.units import declared

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
TENSORS = ("tensor", "tokens", "token_list", "list", "record")
OTHERS = ("str", "int", "float", "bool", "maybe", "image", "video")
"""Kinds that samples of one batch need not agree in: what reads them in a batch is
given batches of 1.
"""


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


# Values: every kind is made from (1, WIDTH) numbers, and read back into such numbers,
# so that all of it matters.


def whole(hidden: Tensor) -> int:
    return int(hidden.detach().double().sum() * 1e4)


def tokens(hidden: Tensor) -> Tensor:
    return hidden[:, None] * torch.arange(1, 2 + whole(hidden) % 4)[None, :, None]


MAKE: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "tensor": lambda hidden: torch.stack([hidden, 2 * hidden])[
            0
        ],  # a view into twice its size
        "tokens": tokens,
        "token_list": lambda hidden: [tokens(hidden), tokens(hidden.cos())],
        "list": lambda hidden: [hidden, hidden.sin()],
        "record": lambda hidden: {
            "left": hidden,
            "inner": [hidden.cos()],
            "size": WIDTH,
        },
        "str": lambda hidden: f"said {whole(hidden)}",
        "int": whole,
        "float": lambda hidden: float(hidden.detach().sum()),
        "bool": lambda hidden: whole(hidden) % 2 == 0,
        "maybe": lambda hidden: hidden if whole(hidden) % 2 else None,
        "image": lambda hidden: Image.fromarray(pixels(hidden).view(2, 2).numpy()),
        "video": lambda hidden: Frames(
            pixels(hidden)[None, :, None, None].expand(1, 4, 1, 3).contiguous(),
            25.0 + whole(hidden) % 5,
        ),
    }
)


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
    in turn, configurations, side.
    """
    hidden = torch.ones(1, WIDTH) if start is None else start
    for i, name in enumerate(sorted(set(named) - set(borrows))):
        hidden = hidden + (i + 1) * read(named[name])
    hidden = hidden.sin()
    for name in borrows:
        if name in NETS:
            hidden = named[name](hidden)
        elif name.endswith("_config"):
            hidden = hidden + named[name]["shift"]
        elif name == "branch":
            hidden = hidden * (2 if named[name] == "negative" else 1)
    return hidden


# Functions of a pipeline spec: closures, whose declarations are drawn.


def unit_body(
    makes: Mapping[str, str], borrows: tuple[str, ...], **named: Any
) -> dict[str, Any]:
    hidden = blend(named, borrows)
    if "rng" in borrows:
        hidden = hidden + named["rng"].normal("jitter", (WIDTH,))
    return {
        name: MAKE[kind](hidden * (i + 1))
        for i, (name, kind) in enumerate(makes.items())
    }


def predict_body(
    borrows: tuple[str, ...], noisy_latents: Tensor, timestep: Tensor, **named: Any
) -> Tensor:
    return blend(named, borrows, noisy_latents + timestep[:, None] / 1000)


def hold_body(
    borrows: tuple[str, ...],
    latents: Tensor,
    timestep: Tensor,
    noise: Tensor,
    **named: Any,
) -> LatentConstraint:
    return LatentConstraint(
        latents + 0.1 * blend(named, borrows) + 0.1 * noise, timestep
    )


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


def program(seed: int) -> Program:
    """Draw programs until one has a plan for all of its rows."""
    for attempt in count():
        drawn = draw_program(random.Random(f"{seed}/{attempt}"))
        try:
            plans(drawn)
        except UsageError:
            continue
        return drawn
    raise AssertionError


def plans(made: Program) -> list[Plan]:
    """The plans of a program, one for each set of inputs that its rows have."""
    absent = {
        (
            *(["number"] if not row["number"] else []),
            *(["picture", "height"] if not row["image"] else []),
        )
        for row in made.rows
    }
    trained = made.trainables.components
    return [
        make_plan(made.spec, frozenset(INPUTS) - set(names), made.task, trained)
        for names in sorted(absent)
    ]


def draw_program(draw: random.Random) -> Program:
    batch_size, kinds = (
        draw.choice((1, 1, 2, 3, 4)),
        {"prompt": "str", "number": "int", "picture": "image", "height": "int"},
    )
    units, padded = [], {}
    for i in range(draw.randint(2, 7)):
        made = {f"v{i}": "tensor"}
        made |= {
            f"{kind}{i}": kind
            for kind in draw.sample((*TENSORS, *OTHERS, *OTHERS), draw.randint(0, 3))
        }
        others = [
            name
            for name, chance in (("rng", 0.15), ("branch", 0.15), ("net_a_config", 0.2))
            if draw.random() < chance
        ]
        borrows = (*draw.sample(NETS, draw.choice((0, 1, 1, 2))), *others)
        body = partial(unit_body, made, borrows)
        units.append(
            declared(f"unit_{i}", body, some(draw, kinds, 3), borrows, made, i + 1)
        )
        padded |= {
            name: 1 for name, kind in made.items() if kind in ("tokens", "token_list")
        }
        kinds |= made
    batched = {
        name: kind for name, kind in kinds.items() if batch_size == 1 or kind in TENSORS
    }
    networks = ("dit", *draw.sample(NETS[1:], draw.randint(0, 1)))
    teachers = tuple(draw.sample(NETS[1:], draw.choice((0, 0, 1))))
    branches = ("positive", "negative") if draw.random() < 0.4 else ("positive",)
    loaded = (*teachers, "rng", "timestep_sampler", "constrain_latents")
    holding = (
        FunctionSpec(
            "constrain_latents", partial(hold_body, ()), some(draw, batched, 1)
        )
        if draw.random() < 0.3
        else None
    )
    spec = PipelineSpec(
        family="random",
        variant="base",
        components=NETS,
        units=tuple(units),
        model_fn=FunctionSpec(
            "predict", partial(predict_body, networks), some(draw, batched, 3), networks
        ),
        decoders=(),
        inputs=INPUTS,
        schedule=FlowMatchSchedule(shift=3.0),
        latent_shape=FunctionSpec("shape", lambda: (1, WIDTH)),
        apply_guidance=lambda positive, negative, scale: positive,
        constrain_latents=holding,
        cfg_inputs={"prompt": "negative_prompt"},
        padded=padded,
    )
    task = Task(
        "random",
        FunctionSpec(
            "loss",
            partial(loss_body, teachers, branches),
            some(draw, batched, 2),
            loaded,
        ),
        branches,
    )
    return Program(spec, task, draw_trainables(draw), {net: draw.choice((0.0, 0.1, 0.5)) for net in NETS},
                   tuple(draw_row(draw) for _ in range(draw.randint(2, 5))), batch_size)  # fmt: skip


def some(
    draw: random.Random, kinds: Mapping[str, str], most: int
) -> Mapping[str, bool]:
    """Names to read, the later ones rather than the first, most of them required."""
    names = list(kinds)[-6:] if draw.random() < 0.7 else list(kinds)
    return MappingProxyType(
        {
            n: draw.random() < 0.6
            for n in draw.sample(names, min(len(names), draw.randint(1, most)))
        }
    )


def draw_trainables(draw: random.Random) -> Trainables:
    full, lora = [], []
    for net in draw.sample(NETS, draw.randint(1, 2)):
        how = draw.choice(("full", "part", "lora"))
        lora += [LoraConfig(net, ("first",), 2, 3.0)] if how == "lora" else []
        full += [] if how == "lora" else [net if how == "full" else f"{net}.first"]
    return Trainables(tuple(full), tuple(lora))


def draw_row(draw: random.Random) -> dict[str, str]:
    return {
        "prompt": draw.choice(("", "a dog", "a dog", "two cats on a roof")),
        "negative": draw.choice(("", "blurry")),
        "number": draw.choice(("", "7", "-3")),
        "image": draw.choice(("", "small.png", "wide.png")),
    }
