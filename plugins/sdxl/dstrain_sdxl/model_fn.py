"""SDXL's denoiser: one call of it, and the shape of its latents."""

from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_sides
from torch import Tensor

CHANNELS = 4
DOWNSCALE = 8
"""Pixels per latent, along each side."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    clip_emb: Tensor,
    open_clip_emb: Tensor,
    pooled_emb: Tensor,
    size_ids: Tensor,
    *,
    unet: Any,
) -> Tensor:
    """Predict what the noise process says, (batch, 4, h, w).

    Args:
        noisy_latents: (batch, 4, h, w).
        timestep: (batch,) fp32, 0 to 999.
        clip_emb: (batch, 77, channels), from the first text encoder.
        open_clip_emb: (batch, 77, channels), from the second one.
        pooled_emb: (batch, channels), from the second one.
        size_ids: (batch, 6), fp32.
        unet: The denoiser.
    """
    prediction: Tensor = unet(
        noisy_latents,
        timestep,
        encoder_hidden_states=torch.cat([clip_emb, open_clip_emb], dim=-1),
        added_cond_kwargs={"text_embeds": pooled_emb, "time_ids": size_ids},
        return_dict=False,
    )[0]
    return prediction


def predict_inpaint(
    noisy_latents: Tensor,
    timestep: Tensor,
    clip_emb: Tensor,
    open_clip_emb: Tensor,
    pooled_emb: Tensor,
    size_ids: Tensor,
    masked_latents: Tensor,
    mask_latents: Tensor,
    *,
    unet: Any,
) -> Tensor:
    """Predict as `predict` does; the denoiser also sees the mask, (batch, 1, h, w), and the
    latents of the image without what it covers, (batch, 4, h, w).
    """
    seen = [noisy_latents, mask_latents.to(noisy_latents.dtype), masked_latents]
    conditions = (timestep, clip_emb, open_clip_emb, pooled_emb, size_ids)
    return predict(torch.cat(seen, dim=1), *conditions, unet=unet)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 4, height / 8, width / 8); raises InputError for a side that is not
    a multiple of 8.
    """
    check_sides(height, width, DOWNSCALE)
    return (1, CHANNELS, height // DOWNSCALE, width // DOWNSCALE)
