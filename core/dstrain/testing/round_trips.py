"""Load what a run saved into a fresh pipeline, and compare."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dstrain.graph import Frames
from dstrain.pipeline import Pipeline
from dstrain.randomness import Rng, SampleKey
from dstrain.runs import OwnParts, open_training_data, train
from dstrain.testing.family_under_test import FamilyUnderTest, processes
from dstrain.testing.split_equivalence import stored
from dstrain.testing.trained_sets import TrainedSet
from dstrain.training import Sample, TrainingModule

STEPS = 2


@dataclass(frozen=True)
class SavedRun:
    """A finished run: its module in eval mode, a cached sample, and the weights file."""

    module: TrainingModule
    sample: Sample
    file: Path

    def predictions(self, pipeline: Pipeline) -> tuple[Tensor, Tensor]:
        """Return the predictions for the sample of the pipeline and of the one that was
        trained.
        """
        return self._prediction(pipeline), self._prediction(self.module.pipeline)

    @torch.no_grad()
    def _prediction(self, pipeline: Pipeline) -> Tensor:
        """Predict for half noise at a timestep of the component that was trained."""
        spec = pipeline.spec
        (component,) = self.module.trained.components
        values = dict(self.sample.values)
        pipeline.run(
            self.module.plan(self.sample.inputs).train_steps,
            values,
            Rng([SampleKey(0, 0, 0, 0)]),
        )
        least, greatest = (
            spec.experts.ranges[spec.experts.expert_of(component)]
            if spec.experts and spec.experts.expert_of(component)
            else (0.0, 1000.0)
        )
        latents: Tensor = values["input_latents"]
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
        constrained = pipeline.constrain_latents(values)(
            (latents + noise) / 2, torch.tensor([(least + greatest) / 2]), noise
        )
        return pipeline.predict(values, constrained.latents, constrained.timestep)


def train_and_save(
    tested: FamilyUnderTest, trained: TrainedSet, output: Path
) -> SavedRun:
    """Train one component for two steps from the cache, as the runner does, at a high
    learning rate.
    """
    kept: list[TrainingModule] = []

    class Kept(TrainingModule):
        """A module that is kept after its run."""

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            kept.append(self)

    setup = stored(
        tested, trained, output_path=output, max_steps=STEPS, learning_rate=1e-2
    )
    train(setup, processes(), OwnParts(Kept))
    return SavedRun(
        kept[0].eval(),
        open_training_data(setup).source.sample(0),
        output / f"step-{STEPS}.safetensors",
    )


def generate(pipeline: Pipeline, given: Mapping[str, Any]) -> tuple[list[Tensor], Any]:
    """Return the latents after each step of a short inference, and its result."""
    latents: list[Tensor] = []
    made = pipeline(**given, on_step=lambda step, now: latents.append(now))
    return latents, made


def pixels(made: Any) -> Tensor:
    """Return the pixels of an image, of frames or of an array: uint8 (frames, height,
    width, channels).
    """
    if isinstance(made, Frames):
        return made.pixels
    found = torch.from_numpy(np.array(made))
    return found[None] if isinstance(made, Image.Image) else found
