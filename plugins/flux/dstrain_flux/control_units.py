"""Units of the variants that a second image controls: what to fill, and ControlNets."""

from typing import Any, TypedDict

import torch
from dstrain.plugin.functional import convert_image, images_to_tensor
from PIL import Image
from torch import Tensor

from dstrain_flux.model_fn import DOWNSCALE
from dstrain_flux.units import encode_pixels


class Fill(TypedDict):
    """An image without the pixels that are to be filled, and where these are."""

    fill_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32: masked pixels are grey."""
    fill_mask: Tensor
    """(1, 64, height / 8, width / 8), bool: for each latent its 8x8 pixels, by rows; true
    where the image is to be filled."""


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
