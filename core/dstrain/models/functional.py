"""Tensor functions that families share: pixel conversion, latent normalization,
patching, guidance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dstrain.errors import InputError


@contextmanager
def override_positional_args(module: nn.Module, *exact: Tensor) -> Iterator[None]:
    """While this lasts, `exact` takes the place of the first positional arguments that
    the module is called with.

    For the module that embeds timesteps: diffusers' transformers round them, (batch,)
    fp32, to the dtype of the hidden states before they call it, and in bf16 500 and 501
    are then one.
    """
    handle = module.register_forward_pre_hook(
        lambda _, arguments: (*exact, *arguments[len(exact) :])
    )
    try:
        yield
    finally:
        handle.remove()


def images_to_tensor(images: Sequence[Image.Image]) -> Tensor:
    """RGB pictures of one size -> (pictures, 3, height, width) fp32 in -1 to 1.

    Colours lie innermost in memory, as in diffusers' pipelines: convolutions of another
    order round otherwise.
    """
    return to_minus_one_one(
        torch.from_numpy(np.stack([np.array(image) for image in images]))
    )


def to_minus_one_one(pixels: Tensor) -> Tensor:
    """uint8 (frames, height, width, 3) -> (frames, 3, height, width) fp32 in -1 to 1."""
    return pixels.permute(0, 3, 1, 2).float() / 255 * 2 - 1


def as_uint8(pixels: Tensor) -> Tensor:
    """(frames, 3, height, width) in -1 to 1, what is beyond cut off -> uint8 (frames,
    height, width, 3) on the CPU.
    """
    return (
        ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255)
        .round()
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .cpu()
    )


def tensor_to_image(pixels: Tensor) -> Image.Image:
    """(1, 3, height, width) in -1 to 1 -> RGB picture."""
    return Image.fromarray(as_uint8(pixels)[0].numpy())


def latents_mean_std(vae_config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of latents per channel, of a VAE that tells them:
    each (1, channels, 1, ...).

    like: latents, (batch, channels, ...), whose dtype, device and number of axes they
    get.
    """
    shape = (1, -1, *[1] * (like.ndim - 2))
    mean, std = (
        like.new_tensor(numbers).view(shape)
        for numbers in (vae_config.latents_mean, vae_config.latents_std)
    )
    return mean, std


def check_sides(height: int, width: int, multiple: int) -> None:
    """Raise InputError for a height or width in pixels that is no multiple of
    `multiple`, naming the nearest.
    """
    for name, side in (("height", height), ("width", width)):
        if side <= 0 or side % multiple:
            near = max(1, round(side / multiple)) * multiple
            raise InputError(
                name,
                f"want a multiple of {multiple}, got {side}; the nearest is {near}",
            )


def pack(latents: Tensor, patch: int = 2) -> Tensor:
    """Latents, (batch, channels, height, width) -> a token per patch, (batch, tokens,
    channels * patch * patch).
    """
    batch, channels, height, width = latents.shape
    patches = latents.reshape(
        batch, channels, height // patch, patch, width // patch, patch
    )
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch**2)


def unpack(tokens: Tensor, height: int, width: int, patch: int = 2) -> Tensor:
    """Tokens of `pack` -> latents, (batch, channels, height, width)."""
    batch, _, channels = tokens.shape
    patches = tokens.reshape(
        batch, height // patch, width // patch, channels // patch**2, patch, patch
    )
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022): from the negative prediction
    through the positive one.
    """
    return negative + scale * (positive - negative)
