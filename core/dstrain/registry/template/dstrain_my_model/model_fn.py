"""Call the denoiser, and compute the shape of its latents."""

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
    """Predict noise - x_0, in the shape of noisy_latents.

    Args:
        noisy_latents: (batch, channels, height, width).
        timestep: (batch,) fp32, 0 to 1000.
        prompt_emb: (batch, bytes, channels).
        prompt_mask: (batch, bytes), bool.
        dit: The denoiser.
    """
    prediction: Tensor = dit(noisy_latents, timestep / 1000, prompt_emb, prompt_mask)
    return prediction


def latent_shape(height: int, width: int, *, dit_config: Any) -> tuple[int, ...]:
    """Return (1, channels, height / 8, width / 8).

    Raises InputError for a height or width that is not a multiple of 8.
    """
    check_sides(height, width, DOWNSCALE)
    return (1, dit_config.channels, height // DOWNSCALE, width // DOWNSCALE)
