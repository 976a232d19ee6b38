"""Z-Image's denoiser: one call of it, its guidance, and the shape of its latents.

Latents keep the VAE's layout, (batch, 16, height / 8, width / 8). The transformer takes
lists of images, (16, 1, h, w), and of texts of any lengths; its time is 0 for noise and
1 for data, and what it predicts is x_0 - noise.
"""

from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_sides
from torch import Tensor

CHANNELS = 16
DOWNSCALE = 8
"""Pixels per latent, along each side."""
SIDE_MULTIPLE = 2 * DOWNSCALE
"""The transformer reads patches of 2x2 latents."""


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
    images = list(noisy_latents[:, :, None])
    texts = unpadded(prompt_emb, prompt_mask)
    predicted = dit(images, model_time(timestep), texts, return_dict=False)[0]
    return -torch.cat(predicted, dim=1).transpose(0, 1)


def model_time(timestep: Tensor) -> Tensor:
    """Return the network's time, 0 to 1, of timesteps, 1000 to 0."""
    return (1000 - timestep) / 1000


def unpadded(embeddings: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the texts of a batch, (tokens, channels) each, without their padding."""
    lengths = mask.sum(dim=1).tolist()
    return [one[:length] for one, length in zip(embeddings, lengths, strict=True)]


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
