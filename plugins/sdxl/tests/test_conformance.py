"""SDXL keeps the contract of a family; diffusers' pipelines are what it must equal."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from diffusers.image_processor import VaeImageProcessor
from dstrain import Pipeline
from dstrain.testing import Conformance
from torch import Tensor

from tests.support.published_steps import add_to


class TestConformance(Conformance):
    family = "sdxl"

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        theirs = StableDiffusionXLPipeline(
            scheduler=EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
            add_watermarker=False,
            **pipe.components,
        )
        theirs.set_progress_bar_config(disable=True)
        given = dict(arguments)
        given["clip_skip"] = given["clip_skip"] - 2
        passed: list[Tensor] = []
        with warnings.catch_warnings():
            # Its scheduler converts tensors as numpy deprecates it.
            warnings.simplefilter("ignore", DeprecationWarning)
            image = theirs(**given, callback_on_step_end=add_to(passed)).images[0]
        return passed, image

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers' pipelines that start from an image."""
        vae = pipe.components["vae"]
        pixels = VaeImageProcessor().preprocess(arguments["input_image"])
        latents: Tensor = vae.encode(pixels).latent_dist.mode()
        return latents * vae.config.scaling_factor
