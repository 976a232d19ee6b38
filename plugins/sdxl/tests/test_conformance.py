"""SDXL keeps the contract of a family; diffusers' pipelines are what it must equal."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl_inpaint
from dstrain import Pipeline
from dstrain.testing import Conformance
from torch import Tensor

from tests.support.published_steps import add_to, encode_the_mode


def one_by_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a U-Net's call that computes the samples of a batch one by one, as ours does
    the branches: the sampler of zero terminal SNR begins at sigma 4096, where a rounding
    error is 2e-4.
    """

    def call(
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        added_cond_kwargs: dict[str, Tensor],
        **given: Any,
    ) -> tuple[Tensor]:
        parts = [
            forward(
                sample[i : i + 1],
                timestep,
                encoder_hidden_states[i : i + 1],
                added_cond_kwargs={
                    name: value[i : i + 1] for name, value in added_cond_kwargs.items()
                },
                **given,
            )[0]
            for i in range(len(sample))
        ]
        return (torch.cat(parts),)

    return call


class TestConformance(Conformance):
    family = "sdxl"

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        is_inpaint = pipe.spec.variant == "inpaint"
        kind = (
            StableDiffusionXLInpaintPipeline
            if is_inpaint
            else StableDiffusionXLPipeline
        )
        theirs = kind(
            scheduler=EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
            add_watermarker=False,
            **pipe.components,
        )
        theirs.set_progress_bar_config(disable=True)
        given = dict(arguments)
        given["clip_skip"] = given["clip_skip"] - 2
        original = (given.pop("original_height"), given.pop("original_width"))
        cut = (given.pop("crop_top"), given.pop("crop_left"))
        given |= {"original_size": original, "crops_coords_top_left": cut}
        if is_inpaint:
            given |= {"image": given.pop("inpaint_image"), "strength": 1.0}
            given["mask_image"] = given.pop("inpaint_mask")
        passed: list[Tensor] = []
        with warnings.catch_warnings():
            # Its scheduler converts tensors as numpy deprecates it.
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(theirs.unet, "forward", one_by_one(theirs.unet.forward))
                encode_the_mode(patch, pipeline_stable_diffusion_xl_inpaint)
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
