"""Z-Image's denoiser: one call of it, its guidance, and the shape of its latents.

Latents keep the VAE's layout, (batch, 16, height / 8, width / 8). The transformer takes
lists of images, (16, 1, h, w), and of texts of any lengths; its time is 0 for noise and
1 for data, and what it predicts is x_0 - noise.
"""

from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_sides
from PIL import Image
from torch import Tensor

CHANNELS = 16
DOWNSCALE = 8
"""Pixels per latent, along each side."""
SIDE_MULTIPLE = 2 * DOWNSCALE
"""The transformer reads patches of 2x2 latents."""
DEFAULT_SIDE = 1024


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents.

    Args:
        noisy_latents: (batch, 16, h, w).
        timestep: (batch,) fp32, 0 to 1000.
        prompt_emb: (batch, tokens, channels).
        prompt_mask: (batch, tokens) bool, true for what is no padding.
        dit: The denoiser.
    """
    texts = [one[kept] for one, kept in zip(prompt_emb, prompt_mask, strict=True)]
    return denoise(dit, list(noisy_latents[:, :, None]), timestep, texts)


def predict_omni(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_parts: Tensor,
    edit_latents: list[Tensor] | None = None,
    edit_embs: list[Tensor] | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, beside images to edit, which the transformer sees at its
    time 1: a text precedes each of them, the prompt and a text follow.

    Args:
        noisy_latents: (batch, 16, h, w).
        timestep: As in `predict`.
        prompt_emb: (batch, tokens, channels), the texts after each other.
        prompt_parts: (batch, tokens): the number of the text that a token is of, from 1;
            0 for padding.
        edit_latents: (batch, 16, h, w) each, of sizes of their own.
        edit_embs: (batch, rows, columns, channels) each, from SigLIP.
        dit: The denoiser.
    """
    latents, embeddings = edit_latents or [], edit_embs or []
    count = len(latents)
    parts = range(1, count + 3 if count else 2)
    images, texts, visions = [], [], []
    for i, noisy in enumerate(noisy_latents):
        images.append([one[i, :, None] for one in latents] + [noisy[:, None]])
        texts.append([prompt_emb[i][prompt_parts[i] == part] for part in parts])
        visions.append([one[i] for one in embeddings] + [None] if count else None)
    return denoise(
        dit,
        images,
        timestep,
        texts,
        siglip_feats=visions,
        image_noise_mask=[[0] * count + [1]] * len(images),
    )


def denoise(
    dit: Any, images: list[Any], timestep: Tensor, texts: list[Any], **named: Any
) -> Tensor:
    """Return what is predicted for the (last) image of each sample, (batch, 16, h, w).

    Args:
        dit: The denoiser.
        images: For each sample, (16, 1, h, w), or several of them.
        timestep: (batch,) fp32, 0 to 1000.
        texts: For each sample, (tokens, channels), or several of them.
        named: Further arguments of the transformer.
    """
    time = (1000 - timestep) / 1000
    predicted = dit(images, time, texts, return_dict=False, **named)[0]
    return -torch.stack(predicted)[:, :, 0]


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance, which is off at 0, as ZImagePipeline of diffusers
    and the publisher do: a scale of theirs is 1 less than one of other families.
    """
    return positive + scale * (positive - negative)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, height / 8, width / 8); raises InputError for a side that is not
    a multiple of 16.
    """
    check_sides(height, width, SIDE_MULTIPLE)
    return (1, CHANNELS, height // DOWNSCALE, width // DOWNSCALE)


@versioned(1)
def latent_shape_omni(
    resized_edit_images: list[Image.Image] | None = None,
    height: int | None = None,
    width: int | None = None,
) -> tuple[int, ...]:
    """Return the shape for a side that is given, else for that of the last image to edit,
    else for 1024 pixels, as diffusers does.
    """
    sides = (DEFAULT_SIDE, DEFAULT_SIDE)
    if resized_edit_images:
        sides = cropped_sides(resized_edit_images[-1])
    return latent_shape(height or sides[0], width or sides[1])


def cropped_sides(image: Image.Image) -> tuple[int, int]:
    """Return the greatest (height, width) within an image that are multiples of 16."""
    height, width = (side // SIDE_MULTIPLE for side in (image.height, image.width))
    return height * SIDE_MULTIPLE, width * SIDE_MULTIPLE
