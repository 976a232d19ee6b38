"""Inference: the same units, model_fn, hold, guide and schedule as training, stepped by
Euler's rule.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Given
from dstrain.graph.plan import POSITIVE, Plan, make_plan
from dstrain.graph.schedule import (
    TRAIN_TIMESTEPS,
    FlowMatchSchedule,
    Held,
    Hold,
    Velocity,
)
from dstrain.graph.spec import Wiring
from dstrain.graph.task import Task
from dstrain.graph.unit import Signature

NEGATIVE = "negative"
NOISE_DEVICE = "cpu"
"""Where initial noise is drawn unless a call, or a row, says otherwise: the same
numbers on every machine.
"""
OnStep = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Sampling:
    """num_inference_steps; guidance_scale: 1 is none; seed of the initial noise;
    latents: that noise itself, if given.

    rand_device: where the noise is drawn. on_step: called after each step with its
    index and the latents.
    """

    num_inference_steps: int
    guidance_scale: float = 1.0
    seed: int = 0
    latents: Tensor | None = None
    on_step: OnStep | None = None
    rand_device: str = NOISE_DEVICE


def _sampled() -> None:
    """Stand where a task has its loss: inference has none, and the sampler runs
    instead.
    """


def generate_task(wiring: Wiring, guided: bool) -> Task:
    """The task whose needs are those of inference: the latents' shape and what the
    decoders read.
    """
    made = {name for decoder in wiring.decoders for name in decoder.makes}
    reads = dict(wiring.latent_shape.reads)
    reads |= {
        name: need
        for decoder in wiring.decoders
        for name, need in decoder.reads.items()
        if name not in made
    }
    borrows = dict.fromkeys(
        name
        for reader in (wiring.latent_shape, *wiring.decoders)
        for name in reader.borrows
    )
    sides = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
    return Task(
        "generate",
        Signature("generate", _sampled, reads, tuple(borrows)),
        sides,
        from_rows=False,
    )


@dataclass(frozen=True)
class Call:
    """The arguments of one inference, with the variant's defaults, and the plan for
    them.
    """

    sampling: Sampling
    inputs: Mapping[str, Any]
    plan: Plan


def planned(
    wiring: Wiring, arguments: Mapping[str, Any], columns: tuple[str, ...] = ()
) -> Call:
    """Split arguments into the fields of `Sampling` and the variant's inputs (prompt,
    height, ...), and plan for them.

    What is not given is the variant's default; None is no value. Guidance is on if
    guidance_scale > 1 and the negative side has its inputs; of a scale that is given,
    an input of that side that is not is '' if it is a text. columns: as in
    `Wiring.plan`. Raises UsageError for a name that is neither, and for an input that
    is needed and absent.
    """
    fields = set(Sampling.__dataclass_fields__)
    known = fields | set(wiring.inputs)
    for name in arguments:
        if name not in known:
            raise UsageError(
                "pipe()", f"takes no argument {name!r}{nearest(name, known)}"
            )
    settings = {name: setting.value for name, setting in wiring.settings.items()}
    merged = {**settings, **wiring.defaults, **arguments}
    merged = {name: value for name, value in merged.items() if value is not None}
    inputs = {name: value for name, value in merged.items() if name not in fields}
    sampling = Sampling(
        **{name: value for name, value in merged.items() if name in fields}
    )
    negatives = {
        negative for positive, negative in wiring.per_side.items() if positive in inputs
    }
    if sampling.guidance_scale > 1 and arguments.get("guidance_scale") is not None:
        inputs |= {
            name: _blank(wiring, name)
            for name in sorted(negatives - {*inputs, *arguments})
        }
    guided = sampling.guidance_scale > 1 and negatives <= set(inputs)
    return Call(
        sampling,
        inputs,
        make_plan(
            wiring, frozenset(inputs), generate_task(wiring, guided), columns=columns
        ),
    )


def _blank(wiring: Wiring, name: str) -> str:
    source = wiring.inputs[name]
    if isinstance(source, Column | Given) and source.kind == "text":
        return ""
    raise UsageError(
        "guidance_scale",
        f"above 1 needs input {name!r} for the negative side, and it is absent",
    )


def integrate(
    schedule: FlowMatchSchedule,
    hold: Hold,
    velocity: Velocity,
    noise: Tensor,
    steps: int,
    on_step: OnStep | None = None,
) -> Held:
    """Step from noise, (batch, channels, ...) fp32, by Euler's rule; returns the last
    latents with the loss mask.

    velocity: (latents, timestep) -> noise - x_0 as predicted, whose gradients are kept
    where the caller keeps any.
    """
    sigmas = schedule.sigmas(
        steps, math.prod(noise.shape[2:]) // schedule.latents_per_token
    )
    latents = noise
    for i in range(steps):
        timestep = (
            (sigmas[i] * TRAIN_TIMESTEPS).expand(latents.shape[0]).to(latents.device)
        )
        held = hold(latents, timestep, noise)
        latents = (
            held.latents
            + (sigmas[i + 1] - sigmas[i])
            * velocity(held.latents, held.timestep).float()
        )
        if on_step is not None:
            on_step(i, latents)
    return hold(latents, torch.zeros(latents.shape[0], device=latents.device), noise)


def seeded_noise(shape: Sequence[int], seed: int, device: str = NOISE_DEVICE) -> Tensor:
    """fp32 noise of one sample; each kind of device draws its own. Raises UsageError
    where that device is absent.
    """
    name = device.strip() or NOISE_DEVICE
    try:
        return torch.randn(
            tuple(shape), generator=torch.Generator(name).manual_seed(seed), device=name
        )
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        what = f"the noise of device {name!r} cannot be drawn here; another device draws other noise from a seed"
        raise UsageError("rand_device", what) from error
