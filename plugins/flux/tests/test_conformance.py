"""FLUX keeps the contract of a family; diffusers' pipeline is what it must equal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxPipeline
from dstrain import Pipeline
from dstrain.models.functional import pack, unpack
from dstrain.testing import Conformance
from dstrain_flux.model_fn import DOWNSCALE
from dstrain_flux.units import resize_kontext
from torch import Tensor

RENAMED = {"guidance_scale": "true_cfg_scale", "embedded_guidance": "guidance_scale"}
PARTS = {
    "dit": "transformer",
    "text_encoder_1": "text_encoder",
    "text_encoder_2": "text_encoder_2",
    "tokenizer_1": "tokenizer",
    "tokenizer_2": "tokenizer_2",
    "vae": "vae",
}


class TestConformance(Conformance):
    family = "flux"
    published_images = 1

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
            folder / "scheduler"
        )
        kontext = pipe.spec.variant == "kontext"
        kind = FluxKontextPipeline if kontext else FluxPipeline
        published = kind(
            scheduler=scheduler,
            **{PARTS[name]: one for name, one in pipe.components.items()},
        )
        published.set_progress_bar_config(disable=True)
        height, width = (arguments[side] // DOWNSCALE for side in ("height", "width"))
        passed: list[Tensor] = []

        def family(
            pipeline: Any, step: int, timestep: Any, values: dict[str, Any]
        ) -> dict[str, Any]:
            passed.append(unpack(values["latents"], height, width))
            return values

        given = {RENAMED.get(name, name): value for name, value in arguments.items()}
        if kontext:  # that both resize an image alike is tested with the units
            (resized,) = resize_kontext(
                given.pop("kontext_images"), given.pop("kontext_pixels")
            )["resized_kontext_images"]
            given |= {
                "image": resized,
                "_auto_resize": False,
                "max_area": given["height"] * given["width"],
            }
        image = published(
            **given | {"latents": pack(arguments["latents"])},
            callback_on_step_end=family,
        ).images[0]
        return passed, image

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers encodes an image to edit."""
        parts = ("scheduler", *PARTS.values())
        published = FluxKontextPipeline(
            **{**dict.fromkeys(parts), "vae": pipe.components["vae"]}
        )
        image = published.image_processor.preprocess(arguments["input_image"])
        latents: Tensor = published._encode_vae_image(image, torch.Generator())
        return latents
