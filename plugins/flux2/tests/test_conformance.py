"""FLUX.2 keeps the contract of a family; diffusers' pipelines are what it must equal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from dstrain import Pipeline
from dstrain.plugin.functional import unpack
from dstrain.testing import Conformance
from dstrain_flux2.units import resize
from torch import Tensor

from tests.support.published_steps import add_to

LAYERS = (1, 2, 3)
"""Those of the toy's four whose states are taken."""
AREAS = ("edit_pixels", "single_edit_pixels")


def build(pipe: Pipeline, folder: Path) -> Any:
    """Build a pipeline of diffusers with the components of ours."""
    variant = pipe.spec.variant
    parts = dict(pipe.components)
    kind = Flux2Pipeline if variant == "dev" else Flux2KleinPipeline
    more = {} if variant == "dev" else {"is_distilled": variant == "klein"}
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    published = kind(scheduler=scheduler, transformer=parts.pop("dit"), **parts, **more)
    published.set_progress_bar_config(disable=True)
    return published


def by_diffusers(
    pipe: Pipeline, folder: Path, given: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """Return the latents after each step of diffusers' pipeline, and its image; arguments
    are ours but for `edit_image`, which is `image` there.
    """
    arguments = dict(given)
    published = build(pipe, folder)
    negative = arguments.pop("negative_prompt", None)
    if negative is not None:
        embedded, _ = published.encode_prompt(negative, text_encoder_out_layers=LAYERS)
        arguments["negative_prompt_embeds"] = embedded
    if "embedded_guidance" in arguments:
        arguments["guidance_scale"] = arguments.pop("embedded_guidance")
    passed: list[Tensor] = []
    rows, columns = arguments["latents"].shape[-2:]
    made = published(
        **arguments,
        text_encoder_out_layers=LAYERS,
        callback_on_step_end=add_to(
            passed, lambda tokens: unpack(tokens, rows, columns, 1)
        ),
    )
    return passed, made.images[0]


class TestConformance(Conformance):
    """Every test of the kit."""

    family = "flux2"

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        """Run diffusers' pipeline; it gets reference images as they are resized here, of
        fewer pixels than it takes: that both do it alike is tested below.
        """
        given = {name: one for name, one in arguments.items() if name != "seed"}
        areas = {name: given.pop(name) for name in AREAS if name in given}
        if areas:
            images = given.pop("edit_image")
            given["image"] = [resize(one, areas["edit_pixels"]) for one in images]
        with patch.object(Flux2ImageProcessor, "check_image_input"):
            return by_diffusers(pipe, folder, given)

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers encodes a reference image."""
        published = build(pipe, folder)
        image = published.image_processor.preprocess(arguments["input_image"])
        latents: Tensor = published._encode_vae_image(image, torch.Generator())
        return latents
