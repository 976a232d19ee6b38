"""Inference: the same units, model_fn, hold, guide and schedule as training, stepped by Euler's rule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.errors import UsageError, nearest
from dstrain.pipeline import Pipeline
from dstrain.plan import POSITIVE
from dstrain.randomness import Rng, SampleKey
from dstrain.schedule import TRAIN_TIMESTEPS
from dstrain.tasks import Task
from dstrain.unit import Signature
from dstrain.wiring import Wiring

NEGATIVE = "negative"
OnStep = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Sampling:
    """num_inference_steps; guidance_scale: 1 is none; seed of the initial noise; latents: that noise itself, if given.

    on_step: called after each step with its index and the latents.
    """

    num_inference_steps: int
    guidance_scale: float = 1.0
    seed: int = 0
    latents: Tensor | None = None
    on_step: OnStep | None = None


def generate_task(wiring: Wiring, guided: bool) -> Task:
    """The task whose needs are those of inference: the latents' shape and what the decoders read."""
    made = {name for decoder in wiring.decoders for name in decoder.makes}
    reads = dict(wiring.latent_shape.reads)
    reads |= {name: need for decoder in wiring.decoders for name, need in decoder.reads.items() if name not in made}
    borrows = dict.fromkeys(name for reader in (wiring.latent_shape, *wiring.decoders) for name in reader.borrows)
    sides = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
    return Task("generate", Signature("generate", sample, reads, tuple(borrows)), sides)


@torch.no_grad()
def generate(pipeline: Pipeline, **arguments: Any) -> Any:
    """Make what the variant's last decoder makes (a picture) from inputs given by name.

    Besides the variant's inputs (prompt, height, ...) takes the fields of `Sampling`; what is not given is the
    family's default. Guidance is on if guidance_scale > 1 and the negative inputs are given.
    """
    sampling, inputs = _arguments(pipeline, arguments)
    negatives = set(pipeline.wiring.per_side.values())
    guided = sampling.guidance_scale > 1 and negatives <= set(inputs)
    plan = pipeline.wiring.plan(frozenset(inputs), generate_task(pipeline.wiring, guided))
    values = dict(inputs)
    pipeline.run((*plan.frozen, *plan.live), values, Rng([SampleKey(sampling.seed, 0, 0, 0)]))
    latents = sample(pipeline, values, sampling, guided)
    return decode(pipeline, values, latents)


def sample(pipeline: Pipeline, values: dict[str, Any], sampling: Sampling, guided: bool) -> Tensor:
    """Integrate from noise to latents: (1, channels, ...) fp32 on the pipeline's device."""
    latents = initial_noise(pipeline, values, sampling)
    schedule = pipeline.wiring.schedule
    tokens = math.prod(latents.shape[2:]) // schedule.latents_per_token
    sigmas = schedule.sigmas(sampling.num_inference_steps, tokens)
    hold, noise = pipeline.hold(values), latents
    for i in range(sampling.num_inference_steps):
        timestep = (sigmas[i] * TRAIN_TIMESTEPS).expand(latents.shape[0]).to(latents.device)
        held = hold(latents, timestep, noise)
        prediction = pipeline.predict(values, held.latents, held.timestep).float()
        if guided:
            negative = pipeline.predict(values, held.latents, held.timestep, NEGATIVE).float()
            prediction = pipeline.wiring.guide(prediction, negative, sampling.guidance_scale)
        latents = held.latents + (sigmas[i + 1] - sigmas[i]) * prediction
        if sampling.on_step is not None:
            sampling.on_step(i, latents)
    last = torch.zeros(latents.shape[0], device=latents.device)
    result: Tensor = hold(latents, last, noise).latents
    return result


def initial_noise(pipeline: Pipeline, values: dict[str, Any], sampling: Sampling) -> Tensor:
    """fp32 noise of the variant's latent shape, drawn on the CPU from the seed, or the latents that were given."""
    if sampling.latents is not None:
        return sampling.latents.to(pipeline.device, torch.float32)
    reader = pipeline.wiring.latent_shape
    reads = {name: values[name] for name in reader.reads if name in values}
    shape = reader.function(**reads, **pipeline.lend(reader))
    noise = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(sampling.seed))
    return noise.to(pipeline.device)


def decode(pipeline: Pipeline, values: dict[str, Any], latents: Tensor) -> Any:
    """Run the decoder units on latents; returns what the last one makes."""
    table = dict(values)
    made: dict[str, Any] = {}
    for decoder in pipeline.wiring.decoders:
        reads = {name: table[name] for name in decoder.reads if name in table}
        made = decoder.run(reads, pipeline.lend(decoder), latents=latents)
        table |= made
    return list(made.values())[-1]


def _arguments(pipeline: Pipeline, arguments: dict[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """Split a call's arguments into sampling settings and inputs; raises UsageError for a name that is neither."""
    fields = set(Sampling.__dataclass_fields__)
    known = fields | set(pipeline.wiring.inputs)
    for name in arguments:
        if name not in known:
            raise UsageError("pipe()", f"takes no argument {name!r}{nearest(name, known)}")
    defaults = {name: value for name, value in pipeline.record.inference.items() if name in known}
    merged = {name: value for name, value in {**defaults, **arguments}.items() if value is not None}
    inputs = {name: value for name, value in merged.items() if name not in fields}
    return Sampling(**{name: value for name, value in merged.items() if name in fields}), inputs
