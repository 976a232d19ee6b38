"""Units of EliGen: prompts of their own for regions of an image."""

from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.plugin import InputError, versioned
from dstrain.plugin.functional import white_pixels
from PIL import Image
from torch import Tensor

from dstrain_flux.model_fn import DOWNSCALE
from dstrain_flux.units import encode_prompt


class EntityPrompts(TypedDict):
    """The prompts of regions, each encoded as a prompt is."""

    entity_emb: Tensor
    """(1, entities, 512, channels), the text encoder's dtype."""


class EntityMasks(TypedDict):
    """Where the regions are."""

    entity_masks: Tensor
    """(1, entities, height / 8, width / 8), bool."""


@versioned(1)
def encode_entities(
    eligen_entity_prompts: list[str],
    *,
    text_encoder_2: Any,
    tokenizer_2: Any,
    device: torch.device,
) -> EntityPrompts:
    """Encode the prompt of each region alone."""
    encoded = [
        encode_prompt(
            prompt,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            device=device,
        )["prompt_emb"]
        for prompt in eligen_entity_prompts
    ]
    return {"entity_emb": torch.stack(encoded, dim=1)}


@versioned(1)
def resize_entity_masks(
    eligen_entity_masks: list[Image.Image],
    eligen_entity_prompts: list[str],
    height: int,
    width: int,
    *,
    device: torch.device,
) -> EntityMasks:
    """Resize masks to the size of the latents, as DiffSynth-Studio does: of each 8x8 pixels
    one tells.

    Raises InputError where there are more masks than prompts, or fewer.
    """
    masks, prompts = len(eligen_entity_masks), len(eligen_entity_prompts)
    if masks != prompts:
        what = f"masks: {masks}, prompts: {prompts}; each region has one of both"
        raise InputError("eligen_entity_masks", what)
    size = (height // DOWNSCALE, width // DOWNSCALE)
    white = np.stack([white_pixels(mask, size) for mask in eligen_entity_masks])
    return {"entity_masks": torch.from_numpy(white)[None].to(device)}
