"""FLUX.2's denoiser: one call of it, and the shape of its latents.

Latents are patches of 2x2 of the VAE's own, (batch, 128, height / 16, width / 16), each
channel normalized: a token for each position. A token has four ids: the image it is of,
its row, its column, and its place in the text.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import (
    check_sides,
    override_positional_args,
    pack,
    unpack,
)
from PIL import Image
from torch import Tensor

CHANNELS = 128
DOWNSCALE = 16
"""Pixels per latent, along each side."""
USUAL_SIDE = 1024
"""Pixels of a side that nothing else decides (Flux2Pipeline of diffusers)."""
IMAGE_STEP = 10
"""What the first ids of reference images grow by, from this on (encode_image_refs of
black-forest-labs/flux2, src/flux2/sampling.py).
"""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    edit_latents: list[Tensor] | None = None,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents.

    Args:
        noisy_latents: (batch, 128, h, w).
        timestep: (batch,) fp32, 0 to 1000.
        prompt_emb: (batch, 512, channels).
        edit_latents: Reference images, (batch, 128, h, w) each, of sizes of their own;
            their tokens follow the noisy ones.
        embedded_guidance: The scale that a guidance-distilled transformer gets.
        dit: The denoiser.
    """
    images = [noisy_latents, *(edit_latents or [])]
    guidance = torch.full_like(timestep, embedded_guidance)
    return denoise(dit, images, timestep / 1000, guidance, prompt_emb)


def predict_klein(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    edit_latents: list[Tensor] | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, for a transformer without embedded guidance."""
    images = [noisy_latents, *(edit_latents or [])]
    return denoise(dit, images, timestep / 1000, None, prompt_emb)


def denoise(
    dit: Any,
    images: Sequence[Tensor],
    time: Tensor,
    guidance: Tensor | None,
    prompt_emb: Tensor,
) -> Tensor:
    """Return what the transformer predicts for the first image, (batch, 128, h, w).

    Args:
        dit: The transformer.
        images: (batch, 128, h, w) each.
        time: (batch,) fp32, 0 to 1.
        guidance: (batch,) fp32, for a transformer that embeds it.
        prompt_emb: (batch, 512, channels).
    """
    first = images[0]
    tokens = [pack(image, 1) for image in images]
    ids = [image_ids(image, IMAGE_STEP * i) for i, image in enumerate(images)]
    text_ids = torch.zeros(prompt_emb.shape[1], 4, device=first.device)
    text_ids[:, 3] = torch.arange(prompt_emb.shape[1], device=first.device)
    embed = dit.time_guidance_embed
    with ExitStack() as stack:
        # The transformer rounds both to the dtype of its hidden states before it makes
        # waves of them.
        for embedder, exact in (
            (embed.timestep_embedder, time),
            (embed.guidance_embedder, guidance),
        ):
            if embedder is not None and exact is not None:
                waves = embed.time_proj(exact * 1000).to(first.dtype)
                stack.enter_context(override_positional_args(embedder, waves))
        made = dit(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=time,
            guidance=guidance,
            encoder_hidden_states=prompt_emb,
            txt_ids=text_ids,
            img_ids=torch.cat(ids),
            return_dict=False,
        )[0]
    return unpack(made[:, : tokens[0].shape[1]], *first.shape[-2:], 1)


def image_ids(latents: Tensor, first: int) -> Tensor:
    """Return the ids of an image's tokens, (tokens, 4): the first one given, row, column
    and 0.
    """
    rows, columns = (
        torch.arange(side, device=latents.device) for side in latents.shape[-2:]
    )
    numbers = torch.cartesian_prod(rows, columns)
    numbers = torch.nn.functional.pad(numbers, (1, 0), value=first)
    return torch.nn.functional.pad(numbers, (0, 1))


@versioned(1)
def latent_shape(
    height: int | None = None,
    width: int | None = None,
    resized_edit_images: list[Image.Image] | None = None,
) -> tuple[int, ...]:
    """Return (1, 128, height / 16, width / 16) for a side that is given, else for that of
    the first reference image, else for 1024; raises InputError for a side that is not a
    multiple of 16.
    """
    near = resized_edit_images[0].size if resized_edit_images else (USUAL_SIDE,) * 2
    width, height = width or near[0], height or near[1]
    check_sides(height, width, DOWNSCALE)
    return (1, CHANNELS, height // DOWNSCALE, width // DOWNSCALE)
