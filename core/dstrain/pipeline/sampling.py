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
from dstrain.graph.inputs import Column, InferenceOnly
from dstrain.graph.plan import POSITIVE, Plan, make_plan
from dstrain.graph.schedule import (
    TRAIN_TIMESTEPS,
    ConstrainLatents,
    FlowMatchSchedule,
    LatentConstraint,
    Velocity,
)
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.graph.unit import FunctionSpec

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


def generate_task(spec: PipelineSpec, guided: bool) -> Task:
    """The task whose needs are those of inference: the latents' shape and what the
    decoders read.
    """
    made = {name for decoder in spec.decoders for name in decoder.outputs}
    reads = dict(spec.latent_shape.inputs)
    reads |= {
        name: need
        for decoder in spec.decoders
        for name, need in decoder.inputs.items()
        if name not in made
    }
    borrows = dict.fromkeys(
        name
        for reader in (spec.latent_shape, *spec.decoders)
        for name in reader.components
    )
    branches = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
    return Task(
        "generate",
        FunctionSpec("generate", _sampled, reads, tuple(borrows)),
        branches,
        from_rows=False,
    )


@dataclass(frozen=True)
class InferenceCall:
    """The arguments of one inference, with the variant's defaults, and the plan for
    them.
    """

    sampling: Sampling
    inputs: Mapping[str, Any]
    plan: Plan


def plan_inference(
    spec: PipelineSpec, arguments: Mapping[str, Any], columns: tuple[str, ...] = ()
) -> InferenceCall:
    """Split arguments into the fields of `Sampling` and the variant's inputs (prompt,
    height, ...), and plan for them.

    What is not given is the variant's default; None is no value. Guidance is on if
    guidance_scale > 1 and the negative side has its inputs; of a scale that is given,
    an input of that side that is not is '' if it is a text. columns: as in
    `PipelineSpec.plan`. Raises UsageError for a name that is neither, and for an input that
    is needed and absent.
    """
    fields = set(Sampling.__dataclass_fields__)
    known = fields | set(spec.inputs)
    for name in arguments:
        if name not in known:
            raise UsageError(
                "pipe()", f"takes no argument {name!r}{nearest(name, known)}"
            )
    settings = {name: setting.value for name, setting in spec.settings.items()}
    merged = {**settings, **spec.defaults, **arguments}
    merged = {name: value for name, value in merged.items() if value is not None}
    inputs = {name: value for name, value in merged.items() if name not in fields}
    sampling = Sampling(
        **{name: value for name, value in merged.items() if name in fields}
    )
    negatives = {
        negative for positive, negative in spec.cfg_inputs.items() if positive in inputs
    }
    if sampling.guidance_scale > 1 and arguments.get("guidance_scale") is not None:
        inputs |= {
            name: _blank(spec, name)
            for name in sorted(negatives - {*inputs, *arguments})
        }
    guided = sampling.guidance_scale > 1 and negatives <= set(inputs)
    return InferenceCall(
        sampling,
        inputs,
        make_plan(
            spec, frozenset(inputs), generate_task(spec, guided), columns=columns
        ),
    )


def _blank(spec: PipelineSpec, name: str) -> str:
    source = spec.inputs[name]
    if isinstance(source, Column | InferenceOnly) and source.kind == "text":
        return ""
    raise UsageError(
        "guidance_scale",
        f"above 1 needs input {name!r} for the negative side, and it is absent",
    )


def integrate(
    schedule: FlowMatchSchedule,
    constrain_latents: ConstrainLatents,
    velocity: Velocity,
    noise: Tensor,
    steps: int,
    on_step: OnStep | None = None,
) -> LatentConstraint:
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
        constrained = constrain_latents(latents, timestep, noise)
        latents = (
            constrained.latents
            + (sigmas[i + 1] - sigmas[i])
            * velocity(constrained.latents, constrained.timestep).float()
        )
        if on_step is not None:
            on_step(i, latents)
    return constrain_latents(
        latents, torch.zeros(latents.shape[0], device=latents.device), noise
    )


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
