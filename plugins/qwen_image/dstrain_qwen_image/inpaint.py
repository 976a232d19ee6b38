"""Inpainting without a model for it: what is outside a mask is kept at every step."""

from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.plugin import InputError, LatentConstraint, versioned
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.model_fn import DOWNSCALE
from dstrain_qwen_image.units import cover, encode_with_vae


class Inpainted(TypedDict):
    """An image of which a part is generated anew."""

    input_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32, normalized per channel."""
    inpaint_region: Tensor
    """(1, 1, 1, height / 8, width / 8), fp32: 1 where it is generated, 0 elsewhere."""


@versioned(1)
def encode_inpainted(
    input_image: Image.Image,
    inpaint_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Inpainted:
    """Encode an image and a mask, white where it is generated anew, both cropped to the
    generated size.

    A latent has the upper left of its 8x8 pixels, as in QwenImageInpaintPipeline of
    diffusers; where that leaves nothing of a fine mask, any of them. Raises InputError
    for a mask that is black.
    """
    image = cover(input_image, height, width)
    mask = cover(inpaint_mask, height, width, "L")
    pixels = np.array(mask) > 127
    white = pixels[::DOWNSCALE, ::DOWNSCALE]
    if not white.any():
        squares = (height // DOWNSCALE, DOWNSCALE, width // DOWNSCALE, DOWNSCALE)
        white = pixels.reshape(squares).any((1, 3))
    if not white.any():
        raise InputError("inpaint_mask", "is black: nothing is left to generate")
    latents = encode_with_vae(image, vae, device, dtype)
    region = torch.from_numpy(white).to(latents)[None, None, None]
    return {"input_latents": latents, "inpaint_region": region}


def keep_outside(
    latents: Tensor,
    timestep: Tensor,
    noise: Tensor,
    input_latents: Tensor,
    inpaint_region: Tensor,
) -> LatentConstraint:
    """Put the image, as noisy as the latents are, where nothing is generated."""
    sigma = timestep.view(-1, 1, 1, 1, 1) / 1000
    kept = sigma * noise + (1 - sigma) * input_latents
    mixed = (1 - inpaint_region) * kept + inpaint_region * latents
    return LatentConstraint(mixed, timestep, inpaint_region)
