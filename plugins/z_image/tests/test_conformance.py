"""Z-Image keeps the contract of a family; diffusers' pipeline is what it must equal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from diffusers.image_processor import VaeImageProcessor
from dstrain import Pipeline
from dstrain.testing import Conformance
from torch import Tensor

from tests.support.published_steps import add_to

PARTS = {
    "dit": "transformer",
    "text_encoder": "text_encoder",
    "tokenizer": "tokenizer",
    "vae": "vae",
}


class TestConformance(Conformance):
    family = "z_image"
    everyday = ("base",)
    published_images = 1

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        published = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
                folder / "scheduler"
            ),
            **{
                PARTS[name]: one
                for name, one in pipe.components.items()
                if name in PARTS
            },
        )
        published.set_progress_bar_config(disable=True)
        passed: list[Tensor] = []
        made = published(**arguments, callback_on_step_end=add_to(passed))
        return passed, made.images[0]

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers' pipelines with this VAE do."""
        vae = pipe.components["vae"]
        pixels = VaeImageProcessor().preprocess(arguments["input_image"])
        latents: Tensor = vae.encode(pixels).latent_dist.mode()
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor
