"""SDXL's denoiser: one call of it, and the shape of its latents."""

from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_sides
from torch import Tensor

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
    """Predict what the noise process says, (batch, 4, h, w), of noisy latents of this
    shape at timesteps, (batch,) fp32, 0 to 999; the conditions are those of the units.
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
    inpaint_latents: Tensor,
    *,
    unet: Any,
) -> Tensor:
    """Predict as `predict` does; the denoiser also sees the mask and the latents of the
    image without what it covers, (batch, 5, h, w).
    """
    seen = torch.cat([noisy_latents, inpaint_latents], dim=1)
    conditions = (timestep, clip_emb, open_clip_emb, pooled_emb, size_ids)
    return predict(seen, *conditions, unet=unet)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 4, height / 8, width / 8); refuses sides that are no multiples of 8."""
    check_sides(height, width, DOWNSCALE)
    return (1, 4, height // DOWNSCALE, width // DOWNSCALE)
