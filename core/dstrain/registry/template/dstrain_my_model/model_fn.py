"""The denoiser: one call of it, and the shape of its latents."""

from typing import Any

from dstrain.plugin.functional import check_sides
from torch import Tensor

DOWNSCALE = 8
"""Pixels per latent, along each side."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy.

    noisy: (batch, channels, h, w). timestep: (batch,) fp32, 0 to 1000. prompt_emb: (batch, bytes, channels).
    prompt_mask: (batch, bytes), bool.
    """
    prediction: Tensor = dit(noisy_latents, timestep / 1000, prompt_emb, prompt_mask)
    return prediction


def latent_shape(height: int, width: int, *, dit_config: Any) -> tuple[int, ...]:
    """Return (1, channels, height / 8, width / 8); raises InputError for a side that is no multiple of 8."""
    check_sides(height, width, DOWNSCALE)
    return (1, dit_config.channels, height // DOWNSCALE, width // DOWNSCALE)
