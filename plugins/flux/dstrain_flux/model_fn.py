"""FLUX's denoiser: one call of it, and the shape of its latents.

Latents keep the VAE's layout, (batch, 16, height / 8, width / 8); the transformer reads
tokens, which are patches of 2x2: (batch, height / 16 * width / 16, 64). Each token has
three ids: the image it is of, its row, its column.
"""

from collections.abc import Sequence
from typing import Any

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import (
    check_sides,
    override_positional_args,
    pack,
    unpack,
)
from torch import Tensor

CHANNELS = 16
DOWNSCALE = 8
"""Pixels per latent, along each side."""
PATCH = 2
"""Latents per token, along each side."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents.

    Args:
        noisy_latents: (batch, 16, h, w).
        timestep: (batch,) fp32, 0 to 1000.
        prompt_emb: (batch, 512, channels), from T5.
        pooled_emb: (batch, channels), from CLIP.
        embedded_guidance: The scale that a guidance-distilled transformer gets; others
            get none.
        dit: The denoiser.
    """
    given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
    return denoise(dit, [noisy_latents], *given)


def predict_schnell(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, for a transformer without embedded guidance."""
    return predict(noisy_latents, timestep, prompt_emb, pooled_emb, dit=dit)


def predict_kontext(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    kontext_latents: list[Tensor],
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does; the tokens of images to edit, (batch, 16, h, w) each,
    of sizes of their own, follow the noisy ones.
    """
    given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
    return denoise(dit, [noisy_latents, *kontext_latents], *given)


def predict_fill(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    fill_latents: Tensor,
    fill_mask: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does; each token also has the latents of the image without
    its masked pixels, (batch, 16, h, w), and the mask, (batch, 64, h, w).
    """
    mask = fill_mask.to(noisy_latents.dtype)
    image = torch.cat([noisy_latents, fill_latents, mask], dim=1)
    given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
    return denoise(dit, [image], *given)


def predict_redux(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    redux_emb: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
    branch: str,
) -> Tensor:
    """Predict as `predict` does; an image's embedding, (batch, tokens, channels), follows
    that of the prompt, but in the negative branch.
    """
    texts = [prompt_emb] if branch == "negative" else [prompt_emb, redux_emb]
    given = (timestep, torch.cat(texts, dim=1), pooled_emb, embedded_guidance)
    return denoise(dit, [noisy_latents], *given)


def predict_regions(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    entity_emb: Tensor,
    entity_masks: Tensor,
    embedded_guidance: float = 1.0,
    *,
    dit: Any,
    branch: str,
) -> Tensor:
    """Predict as `predict` does, with a prompt for each region before that of the whole
    (EliGen: Zhang et al. 2025); the negative branch has that of the whole alone.

    Args:
        noisy_latents: (batch, 16, h, w), like the next three as in `predict`.
        timestep: Noise level.
        prompt_emb: Of the whole.
        pooled_emb: Of the whole.
        entity_emb: (batch, entities, 512, channels).
        entity_masks: (batch, entities, h, w), bool.
        embedded_guidance: As in `predict`.
        dit: The denoiser.
        branch: The branch of guidance.
    """
    texts, arguments = prompt_emb, {}
    if branch != "negative":
        texts = torch.cat([entity_emb.flatten(1, 2), prompt_emb], dim=1)
        mask = region_mask(entity_masks, prompt_emb.shape[1])
        arguments["joint_attention_kwargs"] = {"attention_mask": mask}
    given = (timestep, texts, pooled_emb, embedded_guidance)
    return denoise(dit, [noisy_latents], *given, **arguments)


def region_mask(entity_masks: Tensor, prompt_tokens: int) -> Tensor:
    """Return which tokens attend to which, (batch, 1, tokens, tokens), bool: each prompt to
    itself and to the image's tokens of its region, and these to it; the image's to each
    other.

    A token of the image is in a region if one of its latents is. The last prompt is that of
    the whole.
    """
    regions = torch.nn.functional.max_pool2d(entity_masks.float(), PATCH).flatten(2) > 0
    regions = torch.nn.functional.pad(regions, (0, 0, 0, 1), value=True)
    batch, prompts, tokens = regions.shape
    of_text = regions.repeat_interleave(prompt_tokens, dim=1)
    own = torch.eye(prompts, dtype=torch.bool, device=regions.device)
    own = own.repeat_interleave(prompt_tokens, 0).repeat_interleave(prompt_tokens, 1)
    texts = torch.cat([own.expand(batch, -1, -1), of_text], dim=2)
    image = of_text.new_ones(batch, tokens, tokens)
    images = torch.cat([of_text.transpose(1, 2), image], dim=2)
    return torch.cat([texts, images], dim=1)[:, None]


def denoise(
    dit: Any, images: Sequence[Tensor], *given: Any, **arguments: Any
) -> Tensor:
    """Return what the transformer predicts for the first image, (batch, 16, h, w); the
    arguments are those of `call`.
    """
    height, width = images[0].shape[-2:]
    tokens = call(dit, images, *given, **arguments)[0]
    count = (height // PATCH) * (width // PATCH)
    return unpack(tokens[:, :count], height, width)


def call(
    network: Any,
    images: Sequence[Tensor],
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    embedded_guidance: float,
    **arguments: Any,
) -> Any:
    """Call the transformer, or a network with the same inputs.

    Args:
        network: The network; whether it has embedded guidance is its own matter.
        images: (batch, channels, h, w) each, the noisy one first; their tokens follow each
            other.
        timestep: As in `predict`, like the next three.
        prompt_emb: Its ids are zeros.
        pooled_emb: As in `predict`.
        embedded_guidance: As in `predict`.
        arguments: Further ones of the network.
    """
    time = timestep / 1000
    guidance = None
    if network.config.guidance_embeds:
        guidance = torch.full_like(time, embedded_guidance)
    # The network counts both in thousandths and rounds them to the dtype of its hidden
    # states.
    exact = [value * 1000 for value in (time, guidance) if value is not None]
    tokens = [pack(image) for image in images]
    ids = [image_ids(image, i) for i, image in enumerate(images)]
    with override_positional_args(network.time_text_embed, *exact):
        return network(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=time,
            guidance=guidance,
            pooled_projections=pooled_emb,
            encoder_hidden_states=prompt_emb,
            txt_ids=images[0].new_zeros(prompt_emb.shape[1], 3),
            img_ids=torch.cat(ids),
            return_dict=False,
            **arguments,
        )


def image_ids(latents: Tensor, index: int) -> Tensor:
    """Return the ids of an image's tokens, (tokens, 3): its index (0 for the generated
    one), row and column.
    """
    height, width = latents.shape[-2:]
    rows = torch.arange(height // PATCH, device=latents.device)
    columns = torch.arange(width // PATCH, device=latents.device)
    numbers = torch.cartesian_prod(rows, columns)
    return torch.nn.functional.pad(numbers, (1, 0), value=index).to(latents.dtype)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, height / 8, width / 8); raises InputError for a side that is not
    a multiple of 16.
    """
    check_sides(height, width, DOWNSCALE * PATCH)
    return (1, CHANNELS, height // DOWNSCALE, width // DOWNSCALE)
