"""Wan's denoiser: one call of it per kind of condition, the shape of its latents, and
the first frame that stays clean.

Latents keep the VAE's layout, (batch, channels, latent frames, latent height, latent
width); the transformer itself cuts them into tokens, which are patches of 1x2x2.
"""

from typing import Any

import torch
from dstrain.plugin import InputError, LatentConstraint, versioned
from dstrain.plugin.functional import check_sides
from torch import Tensor
from torch.nn.functional import pad

from dstrain_wan.units import MAX_TOKENS

PATCH = 2
"""Latents per token, along height and width."""


def predict(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, dit: Any
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents, from text alone.

    Args:
        noisy_latents: (batch, channels, frames, h, w).
        timestep: fp32, 0 to 1000, (batch,) or broadcastable to the latents.
        prompt_emb: (batch, tokens, channels), shorter prompts filled up with zeros.
        dit: The denoiser.
    """
    return denoise(noisy_latents, timestep, prompt_emb, None, dit)


def predict_from_first_frame(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, y: Tensor, *, dit: Any
) -> Tensor:
    """Predict as `predict` does, with y, (batch, 20, frames, h, w): which frames are
    known, and their latents.
    """
    latents = torch.cat([noisy_latents, y], dim=1)
    return denoise(latents, timestep, prompt_emb, None, dit)


def predict_from_first_frame_and_clip(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    y: Tensor,
    clip_feature: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict_from_first_frame` does, with clip_feature, (batch, 257, channels): the
    first frame as the image encoder sees it, or, with 514, both ends.
    """
    latents = torch.cat([noisy_latents, y], dim=1)
    return denoise(latents, timestep, prompt_emb, clip_feature, dit)


def denoise(
    latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    clip_feature: Tensor | None,
    dit: Any,
    **conditions: Tensor | None,
) -> Tensor:
    """Call the transformer; the prompt is filled up with zeros to 512 tokens, which it
    attends to as to others.

    Where the transformer tells the features of two images apart, it takes each as a sample.

    The timestep is not cast: its embedding takes sines of it in fp32 first, so that 500
    and 501 stay apart in bf16.
    """
    if timestep.ndim > 1:
        # One per token: that of the patch's first latent, since no patch is clean in
        # part.
        per_latent = timestep.expand(-1, -1, *latents.shape[2:])
        timestep = per_latent[:, 0, :, ::PATCH, ::PATCH].flatten(1)
    if clip_feature is not None and dit.config.pos_embed_seq_len:
        clip_feature = clip_feature.reshape(
            2 * len(clip_feature), -1, clip_feature.shape[-1]
        )
    missing = MAX_TOKENS - prompt_emb.shape[1]
    prediction: Tensor = dit(
        hidden_states=latents,
        timestep=timestep,
        encoder_hidden_states=pad(prompt_emb, (0, 0, 0, missing)),
        encoder_hidden_states_image=clip_feature,
        return_dict=False,
        **conditions,
    )[0]
    return prediction


def keep_first_frame(
    latents: Tensor,
    timestep: Tensor,
    noise: Tensor,
    first_latents: Tensor | None = None,
) -> LatentConstraint:
    """Set latent frame 0 to first_latents, if there are any, at timestep 0, and leave it
    out of the loss.

    Raises InputError when there is no other frame.

    Args:
        latents: (batch, channels, frames, h, w).
        timestep: (batch,) fp32, 0 to 1000.
        noise: Shaped as the latents.
        first_latents: (batch, channels, 1, h, w).
    """
    if first_latents is None:
        return LatentConstraint(latents, timestep)
    if latents.shape[2] == 1:
        raise InputError(
            "num_frames",
            "is 1, and that frame is input_image: nothing is left to learn or generate",
        )
    later = latents.new_ones(1, 1, latents.shape[2], 1, 1)
    later[:, :, 0] = 0
    constrained = torch.cat([first_latents.to(latents.dtype), latents[:, :, 1:]], dim=2)
    return LatentConstraint(constrained, timestep.view(-1, 1, 1, 1, 1) * later, later)


@versioned(1)
def latent_shape(
    height: int, width: int, num_frames: int, *, vae_config: Any
) -> tuple[int, ...]:
    """Return (1, channels, (num_frames - 1) / 4 + 1, height / 8, width / 8); 16 instead
    of 8 for the VAE of 2.2-5B.

    Raises InputError for sides that are not multiples of 16 (2.2-5B: 32) and frames
    that are not 4n + 1.
    """
    spatial = vae_config.scale_factor_spatial
    temporal = vae_config.scale_factor_temporal
    check_sides(height, width, spatial * PATCH)
    if num_frames <= 0 or num_frames % temporal != 1:
        near = max(0, round((num_frames - 1) / temporal)) * temporal + 1
        raise InputError(
            "num_frames",
            f"expected {temporal}n + 1, got {num_frames}; the nearest is {near}",
        )
    frames = (num_frames - 1) // temporal + 1
    return (1, vae_config.z_dim, frames, height // spatial, width // spatial)
