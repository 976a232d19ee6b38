"""Draw noise, and go from it, or a noisy image, to latents with a sampler: Euler's rule, or
a scheduler of diffusers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dstrain.console import silenced
from dstrain.errors import UsageError
from dstrain.graph import ConstrainLatents, PipelineSpec
from dstrain.graph.noise_process import (
    EULER,
    TRAIN_TIMESTEPS,
    Denoise,
    FlowMatchSchedule,
    LatentConstraint,
    MakeSampler,
    NoiseProcess,
    Sampler,
)
from dstrain.lazy import import_name
from dstrain.pipeline.start_image import STRENGTH
from dstrain.randomness import digest

PREDICTION_TYPES = MappingProxyType(
    {
        "velocity": "flow_prediction",
        "epsilon": "epsilon",
        "v": "v_prediction",
        "x_0": "sample",
    }
)
"""What is predicted -> its name in configurations of diffusers."""
NOISE_DEVICE = "cpu"
"""Where initial noise is drawn by default: the same numbers on every machine."""
OnStep = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class SamplerOptions:
    """The options of the sampler."""

    num_inference_steps: int
    guidance_scale: float = 1.0
    """Up to the variant's `no_guidance` there is none."""
    seed: int = 0
    """The seed of the initial noise."""
    latents: Tensor | None = None
    """The initial noise itself, in place of a seed."""
    on_step: OnStep | None = None
    """Called after each step with its index and the constrained latents."""
    rand_device: str = NOISE_DEVICE
    """The device that draws the initial noise."""
    sampler: str = EULER
    """Name of one of the variant's samplers."""
    denoising_strength: float | None = None
    """Share of the steps that are taken, above 0 and at most 1, from the input image or
    video, as noisy as it is where they begin; None starts from noise alone."""

    def __post_init__(self) -> None:
        strength = self.denoising_strength
        if strength is None:
            return
        if not 0 < strength <= 1:
            what = f"expected a number above 0 and at most 1, got {strength}"
            raise UsageError(STRENGTH, what)
        if not self.steps_taken:
            what = f"{strength} leaves none of {self.num_inference_steps} steps"
            raise UsageError(STRENGTH, what)

    @property
    def first_step(self) -> int:
        """Return the index of the first step taken, as diffusers' pipelines do."""
        if self.denoising_strength is None:
            return 0
        steps = self.num_inference_steps
        return int(steps - steps * self.denoising_strength)

    @property
    def steps_taken(self) -> int:
        """Return how many of the schedule's steps are taken."""
        return self.num_inference_steps - self.first_step


class Euler:
    """Euler's rule along the sigmas of flow matching."""

    def __init__(
        self,
        process: NoiseProcess,
        steps: int,
        tokens: int,
        generator: torch.Generator | None = None,
    ) -> None:
        """Take the sigmas of so many steps; raises UsageError for another process."""
        if not isinstance(process, FlowMatchSchedule):
            what = f"euler follows flow matching, and this is {type(process).__name__}"
            raise UsageError("sampler", what, "name one in `samplers` of the variant")
        self.sigmas = process.sigmas(steps, tokens)
        self.timesteps = process.timestep(self.sigmas)

    def start(self, noise: Tensor, clean: Tensor | None, first: int) -> Tensor:
        """Return the noise, or data with as much of it as there is at a step."""
        if clean is None:
            return noise
        return self.sigmas[first] * noise + (1 - self.sigmas[first]) * clean

    def scale(self, latents: Tensor, index: int) -> Tensor:
        """Return the latents as they are."""
        return latents

    def step(self, prediction: Tensor, latents: Tensor, index: int) -> Tensor:
        """Go straight along the velocity."""
        return latents + (self.sigmas[index + 1] - self.sigmas[index]) * prediction


class DiffusersSampler:
    """A scheduler of diffusers."""

    def __init__(self, scheduler: Any, generator: torch.Generator) -> None:
        """Take a scheduler whose timesteps are set, and the generator of the noise that it
        adds at its steps.
        """
        self.scheduler = scheduler
        self.timesteps = torch.cat([scheduler.timesteps.float(), torch.zeros(1)])
        takes = signature(scheduler.step).parameters
        self.given = {"generator": generator} if "generator" in takes else {}

    def start(self, noise: Tensor, clean: Tensor | None, first: int) -> Tensor:
        """Return noise of the scheduler's size, or data with as much of it as there is
        at a step.
        """
        scheduler = self.scheduler
        # Else it looks for the index by its timestep, and several may be equal.
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(first)
        if clean is None:
            # Those of flow matching begin with the noise itself.
            size: Tensor = noise * getattr(scheduler, "init_noise_sigma", 1.0)
            return size
        at = scheduler.timesteps[first : first + 1]
        is_flow = hasattr(scheduler, "scale_noise")
        mixed: Tensor = (
            scheduler.scale_noise(clean, at, noise)
            if is_flow
            else scheduler.add_noise(clean, noise, at)
        )
        return mixed

    def scale(self, latents: Tensor, index: int) -> Tensor:
        """Return latents as the denoiser expects them."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return latents
        at = self.scheduler.timesteps[index]
        scaled: Tensor = self.scheduler.scale_model_input(latents, at)
        return scaled

    def step(self, prediction: Tensor, latents: Tensor, index: int) -> Tensor:
        """Make the scheduler's step."""
        at = self.scheduler.timesteps[index]
        stepped = self.scheduler.step(prediction, at, latents, **self.given)
        after: Tensor = stepped.prev_sample
        return after


def diffusers_sampler(name: str, **config: Any) -> MakeSampler:
    """Return what makes a scheduler of diffusers for each run of inference.

    Args:
        name: Its class, such as DPMSolverMultistepScheduler. One that calls the denoiser
            twice a step is refused when it is made.
        config: The entries of its scheduler_config.json.
    """

    def make(
        process: NoiseProcess, steps: int, tokens: int, generator: torch.Generator
    ) -> Sampler:
        scheduler = import_name("diffusers", name)(**config)
        predicted = getattr(scheduler.config, "prediction_type", None)
        if predicted not in (None, PREDICTION_TYPES[process.predicts]):
            what = f"{name} is of prediction_type {predicted}; expected "
            what += PREDICTION_TYPES[process.predicts]
            raise UsageError("sampler", what)
        if steps > TRAIN_TIMESTEPS and not process.is_continuous:
            what = f"is {steps}; {type(process).__name__} has {TRAIN_TIMESTEPS} levels"
            raise UsageError("num_inference_steps", what)
        given: dict[str, Any] = {}
        if config.get("use_dynamic_shifting") and isinstance(
            process, FlowMatchSchedule
        ):
            given["mu"] = process.mu(tokens)
        try:
            with silenced():  # numpy's deprecations
                scheduler.set_timesteps(steps, **given)
        except ValueError as error:
            raise UsageError("num_inference_steps", f"{name}: {error}") from error
        calls = len(scheduler.timesteps)
        if getattr(scheduler, "order", 1) != 1 or calls != steps:
            what = f"{name} calls the denoiser {calls} times in {steps} steps"
            raise UsageError("sampler", what, "use one that calls it once a step")
        return DiffusersSampler(scheduler, generator)

    return make


def samplers_of(spec: PipelineSpec) -> Mapping[str, MakeSampler]:
    """Return what makes each sampler of a variant; Euler's rule is one of all that are
    trained by flow matching.
    """
    is_flow = isinstance(spec.schedule, FlowMatchSchedule)
    return {**spec.samplers, **({EULER: Euler} if is_flow else {})}


def maker_of(spec: PipelineSpec, name: str) -> MakeSampler:
    """Return what makes a variant's sampler of this name; raises UsageError for a name
    that it has not.
    """
    makers = samplers_of(spec)
    if name not in makers:
        what = f"{name!r} is no sampler of {spec.where}; expected {', '.join(makers)}"
        raise UsageError("sampler", what)
    return makers[name]


def integrate(
    process: NoiseProcess,
    constrain_latents: ConstrainLatents,
    denoise: Denoise,
    noise: Tensor,
    steps: int,
    on_step: OnStep | None = None,
    start: tuple[Tensor, int] | None = None,
    make: MakeSampler = Euler,
    seed: int = 0,
) -> LatentConstraint:
    """Step from noise, (batch, channels, ...) fp32, to the last latents, with the loss
    mask; gradients are kept where the caller keeps them.

    Args:
        process: The noise process of the variant.
        constrain_latents: What the variant keeps fixed at each step.
        denoise: (latents, timestep) -> the prediction, guidance included.
        noise: The initial noise.
        steps: The number of steps.
        on_step: Called after each step with its index, from 0 for the first that is
            taken, and the constrained latents.
        start: Latents without noise that it starts from, shaped as the noise, and the index
            of the first step; None starts from noise alone.
        make: What makes the sampler.
        seed: Decides the noise that a sampler adds at its steps.
    """
    own_seed = int.from_bytes(digest((seed,), "sampler")[:8], "little") >> 1
    generator = torch.Generator().manual_seed(own_seed)
    sampler = make(process, steps, process.tokens(noise.shape), generator)

    def constrained_at(latents: Tensor, index: int) -> LatentConstraint:
        timestep = sampler.timesteps[index].expand(len(latents)).to(noise.device)
        return constrain_latents(latents, timestep, noise)

    clean, first = start or (None, 0)
    constrained = constrained_at(sampler.start(noise, clean, first), first)
    for i in range(first, steps):
        seen = sampler.scale(constrained.latents, i)
        prediction = denoise(seen, constrained.timestep).float()
        latents = sampler.step(prediction, constrained.latents, i)
        constrained = constrained_at(latents, i + 1)
        if on_step is not None:
            on_step(i - first, constrained.latents)
    return constrained


def inference_sigmas(process: NoiseProcess, latents: Tensor, steps: int) -> Tensor:
    """Return (steps + 1,) fp32 sigmas for such latents, (batch, channels, ...)."""
    return Euler(process, steps, process.tokens(latents.shape)).sigmas


def check_noise(noise: object, shape: Sequence[int]) -> Tensor:
    """Return the given initial noise; raises UsageError unless it has this shape."""
    got = list(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
    if got != list(shape):
        what = f"expected a tensor of shape {list(shape)}, got {got}"
        raise UsageError("latents", what)
    assert isinstance(noise, Tensor)
    return noise


def seeded_noise(shape: Sequence[int], seed: int, device: str = NOISE_DEVICE) -> Tensor:
    """Draw the fp32 noise of one sample on a device; other kinds of device draw other
    numbers. Raises UsageError if there is no such device.
    """
    name = device.strip() or NOISE_DEVICE
    try:
        generator = torch.Generator(name).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        what = f"noise cannot be drawn on device {name!r} here; another device gives different noise for the same seed"
        raise UsageError("rand_device", what) from error
