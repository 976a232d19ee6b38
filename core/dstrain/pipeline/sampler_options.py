"""The options of the sampler."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dstrain.errors import UsageError
from dstrain.pipeline.start_image import STRENGTH

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
        """Return the index of the first step taken, as diffusers' pipelines do."""
        if self.denoising_strength is None:
            return 0
        steps = self.num_inference_steps
        return int(steps - steps * self.denoising_strength)

    @property
    def steps_taken(self) -> int:
        """Return how many of the schedule's steps are taken."""
        return self.num_inference_steps - self.first_step
