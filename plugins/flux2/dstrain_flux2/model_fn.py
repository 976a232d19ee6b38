"""FLUX.2's denoiser: one call of it, and the shape of its latents: patches of 2x2 of the VAE's
own, a token each. A token has four ids: image, row, column, place in the text.
"""

from contextlib import ExitStack
from typing import Any

import torch
from dstrain.plugin import functional, versioned
from torch import Tensor

CHANNELS = 128
DOWNSCALE = 16
"""Pixels per latent, along each side."""
IMAGE_STEP = 10
"""Step of images' first ids (src/flux2/sampling.py of black-forest-labs/flux2)."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    edit_latents: list[Tensor] | None = None,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents, (batch, 128, h, w); the text is (batch,
    512, channels), reference images are as the latents, of sizes of their own.
    """
    images = [noisy_latents, *(edit_latents or [])]
    tokens = [functional.pack(image, 1) for image in images]
    places = [(i * IMAGE_STEP, *image.shape[-2:], 1) for i, image in enumerate(images)]
    time = timestep / 1000
    guidance = None
    if dit.config.guidance_embeds:
        guidance = torch.full_like(time, embedded_guidance)
    embed = dit.time_guidance_embed
    exact = {embed.timestep_embedder: time, embed.guidance_embedder: guidance}
    with ExitStack() as stack:
        # The transformer would round both to the dtype of its hidden states.
        for embedder, value in exact.items():
            if value is not None:
                waves = embed.time_proj(value * 1000).to(noisy_latents.dtype)
                replaced = functional.override_positional_args(embedder, waves)
                stack.enter_context(replaced)
        made = dit(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=time,
            guidance=guidance,
            encoder_hidden_states=prompt_emb,
            txt_ids=token_ids(0, 1, 1, prompt_emb.shape[1], device=time.device),
            img_ids=torch.cat([token_ids(*one, device=time.device) for one in places]),
            return_dict=False,
        )[0]
    sides = noisy_latents.shape[-2:]
    return functional.unpack(made[:, : tokens[0].shape[1]], *sides, 1)


def predict_klein(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    edit_latents: list[Tensor] | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, for a transformer without embedded guidance."""
    return predict(noisy_latents, timestep, prompt_emb, edit_latents, dit=dit)


def token_ids(first: int, *sides: int, device: torch.device) -> Tensor:
    """Return the ids of an image's or text's tokens, (tokens, 4), with this first one."""
    axes = [torch.arange(side, device=device) for side in sides]
    return torch.cartesian_prod(torch.tensor([first], device=device), *axes)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 128, height / 16, width / 16) for sides that are multiples of 16."""
    functional.check_sides(height, width, DOWNSCALE)
    return (1, CHANNELS, height // DOWNSCALE, width // DOWNSCALE)
