"""EliGen: prompts of parts of the image, each of which these parts alone attend to."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, versioned
from dstrain.plugin.functional import white_pixels
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.model_fn import DOWNSCALE, PATCH, predict, predict_images
from dstrain_qwen_image.units import encode_prompt


class EntityPrompts(TypedDict):
    """The encoded prompts of the entities, each as the image's own."""

    entity_emb: list[Tensor]
    """(1, tokens, channels) each, the text encoder's dtype."""
    entity_emb_mask: list[Tensor]
    """(1, tokens) each, bool."""


class EntityRegions(TypedDict):
    """The image tokens of each entity."""

    entity_regions: Tensor
    """(1, entities, height / 16 * width / 16), bool."""


@versioned(1)
def encode_entity_prompts(
    eligen_entity_prompts: list[str],
    height: int | None = None,
    width: int | None = None,
    *,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
) -> EntityPrompts:
    """Encode the prompt of each entity as `encode_prompt` does."""
    parts = {"text_encoder": text_encoder, "tokenizer": tokenizer, "device": device}
    made = [
        encode_prompt(prompt, height, width, **parts)
        for prompt in eligen_entity_prompts
    ]
    return {
        "entity_emb": [one["prompt_emb"] for one in made],
        "entity_emb_mask": [one["prompt_mask"] for one in made],
    }


@versioned(1)
def find_entity_tokens(
    eligen_entity_masks: list[Image.Image],
    eligen_entity_prompts: list[str],
    height: int,
    width: int,
) -> EntityRegions:
    """Find the image tokens in which a mask is white in one latent at least.

    A latent has the pixel in its middle. Raises InputError for another number of masks
    than of prompts.
    """
    masks, prompts = len(eligen_entity_masks), len(eligen_entity_prompts)
    if masks != prompts:
        what = f"masks: {masks}, prompts: {prompts}; each entity has one of both"
        raise InputError("eligen_entity_masks", what)
    size = (height // DOWNSCALE, width // DOWNSCALE)
    found = []
    for mask in eligen_entity_masks:
        latents = white_pixels(mask, size)
        rows, columns = (side // PATCH for side in latents.shape)
        tokens = latents.reshape(rows, PATCH, columns, PATCH).any((1, 3))
        found.append(torch.from_numpy(tokens.flatten()))
    return {"entity_regions": torch.stack(found)[None]}


def predict_entities(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    entity_emb: list[Tensor],
    entity_emb_mask: list[Tensor],
    entity_regions: Tensor,
    *,
    dit: Any,
    branch: str,
) -> Tensor:
    """Predict as `predict` does; the prompts of entities precede the image's own, and
    each has positions as if it were alone (Zhang et al. 2025, "EliGen").

    The negative branch has no entities.
    """
    if branch == "negative":
        return predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)
    # Late: diffusers is slow to import, and planning needs no denoiser.
    from dstrain_qwen_image.masked_attention import use_masked_attention

    use_masked_attention(dit)
    texts = [*entity_emb, prompt_emb]
    valid = torch.cat([*entity_emb_mask, prompt_mask], dim=1)
    lengths = [text.shape[1] for text in texts]
    attended = attention_mask(lengths, valid, entity_regions)
    device = noisy_latents.device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def restart(_: Any, given: Any, made: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        image, text = made
        return image, text[positions]

    handle = dit.pos_embed.register_forward_hook(restart)
    try:
        return predict_images(
            [noisy_latents],
            1,
            timestep,
            torch.cat(texts, dim=1),
            torch.ones_like(valid),
            dit=dit,
            attention_kwargs={"attention_mask": attended},
        )
    finally:
        handle.remove()


def attention_mask(lengths: list[int], valid: Tensor, regions: Tensor) -> Tensor:
    """Return which token (row) attends to which (column), (batch, 1, tokens, tokens) bool.

    A text attends to itself and to its region, which attends to it; the image attends to
    itself.

    Args:
        lengths: The tokens of each text; the last one is of the whole image.
        valid: Whether a token of the texts is no padding, (batch, tokens).
        regions: The image tokens of the other texts, (batch, texts, image tokens).
    """
    counts = torch.tensor(lengths, device=valid.device)
    owner = torch.arange(len(lengths), device=valid.device).repeat_interleave(counts)
    everywhere = torch.ones_like(regions[:, :1])
    text_to_image = torch.cat([regions, everywhere], dim=1)[:, owner]
    keys = valid[:, None]
    text_to_text = (owner[:, None] == owner) & keys
    image_to_text = text_to_image.transpose(1, 2) & keys
    size = regions.shape[-1]
    image_to_image = valid.new_ones(len(valid), size, size)
    from_text = torch.cat([text_to_text, text_to_image], dim=2)
    from_image = torch.cat([image_to_text, image_to_image], dim=2)
    return torch.cat([from_text, from_image], dim=1)[:, None]
