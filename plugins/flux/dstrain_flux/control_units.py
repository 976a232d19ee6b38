"""Units of the variants that a second image controls: what to fill, and ControlNets."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import convert_image, images_to_tensor
from PIL import Image
from torch import Tensor

from dstrain_flux.model_fn import DOWNSCALE
from dstrain_flux.units import encode_pixels

CONTROL_MODES = ("canny", "tile", "depth", "blur", "pose", "gray", "lq")
"""Kinds of images, by their numbers in FLUX.1-dev-Controlnet-Union-alpha (its model card)."""


class Fill(TypedDict):
    """An image without the pixels that are to be filled, and where these are."""

    fill_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32: masked pixels are grey."""
    fill_mask: Tensor
    """(1, 64, height / 8, width / 8), bool: for each latent its 8x8 pixels, by rows; true
    where the image is to be filled."""


class Control(TypedDict):
    """A control image."""

    control_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32; a 17th channel is 1 where an image is known,
    0 where it is to be painted."""


class ControlMode(TypedDict):
    """What kind of image a control image is."""

    control_mode: Tensor
    """(1, 1), integer."""


@versioned(1)
def encode_fill(
    flux_fill_image: Image.Image,
    flux_fill_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Fill:
    """Encode an image and its mask as FluxFillPipeline of diffusers does, but for the mode
    of the VAE's distribution in place of a sample.
    """
    mask = binary_mask(flux_fill_mask, height, width)
    pixels = resized_pixels(flux_fill_image, height, width) * (1 - mask)
    patches = torch.nn.functional.pixel_unshuffle(mask, DOWNSCALE)
    return {
        "fill_latents": encode_pixels(pixels, vae, device, dtype),
        "fill_mask": patches.bool().to(device),
    }


@versioned(1)
def encode_control(
    controlnet_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Control:
    """Encode a control image at the size of the image to generate."""
    pixels = resized_pixels(controlnet_image, height, width)
    return {"control_latents": encode_pixels(pixels, vae, device, dtype)}


@versioned(1)
def encode_masked_control(
    controlnet_image: Image.Image,
    controlnet_inpaint_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Control:
    """Encode an image of which the masked part is to be painted, as the publisher of
    FLUX.1-dev-Controlnet-Inpainting-Beta does (controlnet_flux.py and
    pipeline_flux_controlnet_inpaint.py of alimama-creative/FLUX-Controlnet-Inpainting).
    """
    mask = binary_mask(controlnet_inpaint_mask, height, width)
    pixels = resized_pixels(controlnet_image, height, width)
    # What is masked is black.
    latents = encode_pixels(pixels.where(mask == 0, -1.0), vae, device, dtype)
    known = 1 - torch.nn.functional.interpolate(mask, latents.shape[-2:])
    return {"control_latents": torch.cat([latents, known.to(device)], dim=1)}


@versioned(1)
def find_control_mode(
    controlnet_processor_id: str, *, device: torch.device
) -> ControlMode:
    """Return the number by which a union of ControlNets knows a kind of image."""
    number = CONTROL_MODES.index(controlnet_processor_id)
    return {"control_mode": torch.tensor([[number]], device=device)}


def resized_pixels(image: Image.Image, height: int, width: int) -> Tensor:
    """Return an image at a size, as (1, 3, height, width) fp32 in -1 to 1."""
    rgb = convert_image(image, "RGB")
    return images_to_tensor([rgb.resize((width, height), Image.Resampling.LANCZOS)])


def binary_mask(mask: Image.Image, height: int, width: int) -> Tensor:
    """Return a mask at a size, as (1, 1, height, width) fp32: 1 from half grey on, else
    0.
    """
    resized = mask.resize((width, height), Image.Resampling.LANCZOS)
    pixels = images_to_tensor([convert_image(resized, "RGB")])[:, :1]
    return (pixels >= 0).float()
