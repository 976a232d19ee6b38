"""FLUX keeps the contract of a family; diffusers' pipeline is what it must equal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
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


CLASSES = {"kontext": FluxKontextPipeline, "fill": FluxFillPipeline}


def build(pipe: Pipeline, folder: Path, kind: Any) -> Any:
    """Build a pipeline of diffusers with the components of ours."""
    published = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        **{PARTS[name]: pipe.components[name] for name in PARTS},
    )
    published.set_progress_bar_config(disable=True)
    return published


def kontext(given: dict[str, Any]) -> None:
    """Give Kontext's image resized: that both do it alike is tested with the units."""
    images, pixels = given.pop("kontext_images"), given.pop("kontext_pixels")
    (resized,) = resize_kontext(images, pixels)["resized_kontext_images"]
    area = given["height"] * given["width"]
    given |= {"image": resized, "_auto_resize": False, "max_area": area}


def fill(given: dict[str, Any]) -> None:
    """Give Fill's image and mask by the names of diffusers."""
    given |= {"image": given.pop("flux_fill_image")}
    given |= {"mask_image": given.pop("flux_fill_mask")}
    del given["true_cfg_scale"]


ADAPTED = {"kontext": kontext, "fill": fill}


@contextmanager
def modes() -> Iterator[None]:
    """Let VAEs of diffusers encode as the mode: some pipelines draw a sample instead."""
    kind = DiagonalGaussianDistribution
    with patch.object(kind, "sample", lambda self, generator=None: self.mode()):
        yield


class TestConformance(Conformance):
    family = "flux"
    everyday = ("dev", "kontext", "fill")
    published_images = 1

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        variant = pipe.spec.variant
        published = build(pipe, folder, CLASSES.get(variant, FluxPipeline))
        height, width = (arguments[side] // DOWNSCALE for side in ("height", "width"))
        passed: list[Tensor] = []

        def family(
            pipeline: Any, step: int, timestep: Any, values: dict[str, Any]
        ) -> dict[str, Any]:
            passed.append(unpack(values["latents"], height, width))
            return values

        given = {RENAMED.get(name, name): value for name, value in arguments.items()}
        given["latents"] = pack(arguments["latents"])
        ADAPTED.get(variant, lambda _: None)(given)
        with modes():
            image = published(**given, callback_on_step_end=family).images[0]
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
