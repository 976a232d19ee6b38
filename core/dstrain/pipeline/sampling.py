"""Plan inference and integrate from noise, or a noisy image, to latents by Euler's rule, with the same
units, model_fn and schedule as training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.graph import (
    NEGATIVE,
    POSITIVE,
    ConstrainLatents,
    FunctionSpec,
    PipelineSpec,
    Plan,
    Task,
    make_plan,
)
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.graph.noise_schedule import (
    TRAIN_TIMESTEPS,
    FlowMatchSchedule,
    LatentConstraint,
    Velocity,
)
from dstrain.models import Found, ModelConfig, find
from dstrain.pipeline.arguments import STRENGTH, check_start
from dstrain.pipeline.loss_masks import LATENTS
from dstrain.pipeline.variant_choice import check_denoiser
from dstrain.registry import ModelFamily

NOISE_DEVICE = "cpu"
"""Where initial noise is drawn by default: the same numbers on every machine."""
OnStep = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class SamplerOptions:
    """The options of the sampler."""

    num_inference_steps: int
    guidance_scale: float = 1.0
    """1 is no guidance."""
    seed: int = 0
    """The seed of the initial noise."""
    latents: Tensor | None = None
    """The initial noise itself, in place of a seed."""
    on_step: OnStep | None = None
    """Called after each step with its index and the constrained latents."""
    rand_device: str = NOISE_DEVICE
    """The device that draws the initial noise."""
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
        """Return the index of the first step that is taken, as image to image pipelines
        of diffusers have it.
        """
        if self.denoising_strength is None:
            return 0
        steps = self.num_inference_steps
        return int(steps - steps * self.denoising_strength)

    @property
    def steps_taken(self) -> int:
        """Return how many of the schedule's steps are taken."""
        return self.num_inference_steps - self.first_step


def _no_loss() -> None:
    """Stand where a task has its loss: in inference the sampler runs instead."""


def generate_task(spec: PipelineSpec, guided: bool, from_latents: bool = False) -> Task:
    """Return a task that needs what inference needs: the inputs of the latents' shape
    and of the decoders, and the latents of an image or video that it starts from.
    """
    inputs = dict(spec.latent_shape.inputs)
    if from_latents:
        inputs[LATENTS] = True
    components = dict.fromkeys(spec.latent_shape.components)
    decoded: set[str] = set()
    for decoder in spec.decoders:
        for name, is_required in decoder.inputs.items():
            if name not in decoded:
                inputs[name] = is_required
        components |= dict.fromkeys(decoder.components)
        decoded.update(decoder.outputs)
    function = FunctionSpec("generate", _no_loss, inputs, tuple(components))
    branches = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
    return Task("generate", function, branches, from_rows=False)


def find_for_inference(
    family: ModelFamily,
    spec: PipelineSpec,
    models: Sequence[ModelConfig],
    keepers: Keepers = AS_LOADED,
    absent: list[MissingFiles] | None = None,
) -> Found:
    """Find the files of everything that inference with any inputs uses, kept so; missing
    ones are added to `absent`, if that is given.
    """
    plan = make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
    components = plan.components[""]
    configs = plan.configs[""]
    found = find(family, models, components, configs, spec.components, absent)
    check_denoiser(family, spec, found)
    return found.kept(keepers)


@dataclass(frozen=True)
class InferenceCall:
    """The arguments of one inference, defaults included, and the plan for them."""

    sampling: SamplerOptions
    inputs: dict[str, Any]
    plan: Plan


def plan_inference(
    spec: PipelineSpec,
    arguments: Mapping[str, Any],
    columns: tuple[str, ...] = (),
    family: ModelFamily | None = None,
) -> InferenceCall:
    """Split arguments into the fields of `SamplerOptions` and the variant's inputs (prompt,
    height, ...), add the variant's defaults, and plan.

    Guidance is on if guidance_scale > 1 and the inputs of the negative branch are
    there. If the scale is an argument, missing texts among them are ''. Raises
    UsageError for an unknown argument, and for a required input that is missing.

    Args:
        spec: The pipeline spec.
        arguments: Arguments by name; None counts as absent.
        columns: As in `make_plan`.
        family: The family whose other variants may know an argument.
    """
    fields = set(SamplerOptions.__dataclass_fields__)
    known = fields | set(spec.inputs)
    for name in arguments:
        if name not in known:
            what = f"takes no argument {name!r}{nearest(name, known)}"
            others = []
            if family is not None:
                variants = family.variants
                others = [one for one in variants if name in family.spec(one).inputs]
            advice = f"it is an input of {', '.join(others)}; load it with variant=NAME"
            raise UsageError("pipe()", what, *([advice] if others else []))
    constants = {name: one.value for name, one in spec.constants.items()}
    values = {**constants, **spec.defaults, **arguments}
    inputs = {name: value for name, value in values.items() if value is not None}
    options = {name: inputs.pop(name) for name in fields & inputs.keys()}
    sampling = SamplerOptions(**options)
    from_latents = sampling.denoising_strength is not None
    if from_latents:
        check_start(spec, inputs)
    guided = sampling.guidance_scale > 1
    negatives = {
        negative for positive, negative in spec.cfg_inputs.items() if positive in inputs
    }
    if guided and arguments.get("guidance_scale") is not None:
        for name in sorted(negatives - {*inputs, *arguments}):
            if spec.inputs[name].kind != "text":
                what = f"above 1 needs input {name!r} for the negative branch, which is absent"
                raise UsageError("guidance_scale", what)
            inputs[name] = ""
    guided = guided and negatives <= inputs.keys()
    task = generate_task(spec, guided, from_latents)
    plan = make_plan(spec, frozenset(inputs), task, columns=columns)
    return InferenceCall(sampling, inputs, plan)


def integrate(
    schedule: FlowMatchSchedule,
    constrain_latents: ConstrainLatents,
    velocity: Velocity,
    noise: Tensor,
    steps: int,
    on_step: OnStep | None = None,
    start: tuple[Tensor, int] | None = None,
) -> LatentConstraint:
    """Step from noise, (batch, channels, ...) fp32, to the last latents, with the loss
    mask; gradients are kept where the caller keeps them.

    Args:
        schedule: The sigmas.
        constrain_latents: What the variant keeps fixed at each step.
        velocity: (latents, timestep) -> the prediction of noise - x_0.
        noise: The initial noise.
        steps: The number of steps of the schedule.
        on_step: Called after each step with its index, from 0 for the first that is
            taken, and the constrained latents.
        start: Latents without noise that it starts from, shaped as the noise, and the index
            of the first step; None starts from noise alone.
    """
    sigmas = inference_sigmas(schedule, noise, steps)

    def constrained_at(latents: Tensor, sigma: Tensor) -> LatentConstraint:
        timestep = (sigma * TRAIN_TIMESTEPS).expand(len(latents)).to(noise.device)
        return constrain_latents(latents, timestep, noise)

    first, latents = 0, noise
    if start is not None:
        clean, first = start
        latents = sigmas[first] * noise + (1 - sigmas[first]) * clean
    constrained = constrained_at(latents, sigmas[first])
    for i in range(first, steps):
        prediction = velocity(constrained.latents, constrained.timestep).float()
        latents = constrained.latents + (sigmas[i + 1] - sigmas[i]) * prediction
        constrained = constrained_at(latents, sigmas[i + 1])
        if on_step is not None:
            on_step(i - first, constrained.latents)
    return constrained


def inference_sigmas(
    schedule: FlowMatchSchedule, latents: Tensor, steps: int
) -> Tensor:
    """Return (steps + 1,) fp32 sigmas of the sampler for latents of this size, (batch,
    channels, ...).
    """
    return schedule.sigmas(steps, schedule.tokens(latents.shape))


def check_noise(noise: object, shape: Sequence[int]) -> Tensor:
    """Return the initial noise that was given, if it is a tensor of this shape; raises
    UsageError.
    """
    got = list(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
    if got != list(shape):
        what = f"expected a tensor of shape {list(shape)}, got {got}"
        raise UsageError("latents", what)
    assert isinstance(noise, Tensor)
    return noise


def seeded_noise(
    shape: Sequence[int],
    seed: int,
    device: str = NOISE_DEVICE,
) -> Tensor:
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
