"""SDXL's units: prompt and image to conditions and latents, and latents to an image."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_length, images_to_tensor, tensor_to_image
from PIL import Image
from torch import Tensor

MAX_TOKENS = 77
"""Tokens of a prompt that CLIP encodes, its start and end included."""


class Prompt(TypedDict):
    """A prompt, encoded by the first text encoder."""

    clip_emb: Tensor
    """(1, 77, channels), the text encoder's dtype."""


class Prompt2(TypedDict):
    """A prompt, encoded by the second text encoder."""

    open_clip_emb: Tensor
    """(1, 77, channels), the text encoder's dtype."""
    pooled_emb: Tensor
    """(1, channels): the projected state at the prompt's end."""


class SizeIds(TypedDict):
    """What the denoiser is told of the image's size."""

    size_ids: Tensor
    """(1, 6), fp32 pixels: the original height and width, the top and left of what was
    cropped, the height and width."""


class Latents(TypedDict):
    """An image in the VAE's latent space, scaled."""

    input_latents: Tensor
    """(1, 4, height / 8, width / 8), fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_prompt(
    prompt: str,
    clip_skip: int,
    *,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
    branch: str,
) -> Prompt:
    """Encode a prompt of 77 tokens at most; zeros for a blank negative one, as the
    published force_zeros_for_empty_prompt has it.
    """
    check_length(tokenizer, prompt, MAX_TOKENS, "CLIP")
    tokens = _tokens(prompt, tokenizer).to(device)
    hidden = text_encoder(tokens, output_hidden_states=True).hidden_states[-clip_skip]
    return {"clip_emb": hidden * _is_encoded(prompt, branch)}


@versioned(1)
def encode_prompt_2(
    prompt: str,
    clip_skip: int,
    *,
    text_encoder_2: Any,
    tokenizer_2: Any,
    device: torch.device,
    branch: str,
) -> Prompt2:
    """Encode a prompt as `encode_prompt` does, with its state at the end."""
    tokens = _tokens(prompt, tokenizer_2).to(device)
    encoded = text_encoder_2(tokens, output_hidden_states=True)
    factor = _is_encoded(prompt, branch)
    return {
        "open_clip_emb": encoded.hidden_states[-clip_skip] * factor,
        "pooled_emb": encoded.text_embeds * factor,
    }


@versioned(1)
def encode_sizes(height: int, width: int, *, device: torch.device) -> SizeIds:
    """Return the sizes of the image in the order in which the denoiser reads them."""
    ids = [height, width, 0, 0, height, width]
    return {"size_ids": torch.tensor([ids], dtype=torch.float32, device=device)}


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 8, as the mode of the VAE's
    distribution.
    """
    pixels = images_to_tensor([input_image]).to(device, dtype)
    mode: Tensor = vae.encode(pixels).latent_dist.mode().float()
    return {"input_latents": mode * vae.config.scaling_factor}


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 4, height / 8, width / 8), to an RGB image."""
    scaled = latents.to(vae.device, torch.float32) / vae.config.scaling_factor
    pixels = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
    return {"image": tensor_to_image(pixels)}


def _is_encoded(prompt: str, branch: str) -> float:
    """Return 0 where a prompt is blank and of the negative branch, else 1."""
    return float(bool(prompt) or branch != "negative")


def _tokens(prompt: str, tokenizer: Any) -> Tensor:
    """Return the ids of a prompt cut or padded to the length, (1, 77)."""
    tokens = tokenizer(
        [prompt],
        padding="max_length",
        max_length=MAX_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    ids: Tensor = tokens.input_ids
    return ids
