"""Z-Image's units: prompt and image to conditions, and latents to an image."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import check_length, images_to_tensor, tensor_to_image
from PIL import Image
from torch import Tensor

PREFIX = "<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
"""What Qwen3's chat template puts around a prompt, with thinking enabled."""
MAX_TOKENS = 512
"""Tokens of a prompt in its template that are kept (ZImagePipeline of diffusers)."""


class Prompt(TypedDict):
    """An encoded prompt."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_mask: Tensor
    """(1, tokens), bool: all true; a batch pads it."""


class Latents(TypedDict):
    """An image in the VAE's latent space, normalized."""

    input_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt in its chat template as the text encoder's last states but one."""
    text = PREFIX + prompt + SUFFIX
    check_length(tokenizer, text, MAX_TOKENS, "Z-Image")
    states = encode_text(text, text_encoder, tokenizer, device)
    mask = torch.ones(states.shape[:2], dtype=torch.bool, device=device)
    return {"prompt_emb": states, "prompt_mask": mask}


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16, as the mode of the VAE's
    distribution.
    """
    return {"input_latents": encode_with_vae(input_image, vae, device, dtype)}


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 16, height / 8, width / 8), to an RGB image."""
    latents = latents.to(vae.device, vae.dtype)
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    return {"image": tensor_to_image(vae.decode(scaled, return_dict=False)[0])}


def encode_text(
    text: str, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Tensor:
    """Return the last hidden states but one of a text's first 512 tokens, (1, tokens,
    channels).
    """
    tokens = tokenizer(
        [text], max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).to(device)
    # The encoder is causal: without padding, states are those that they have with it. Its
    # head, whose scores of words nothing reads, is left out.
    states = text_encoder.model(**tokens, output_hidden_states=True, use_cache=False)
    found: Tensor = states.hidden_states[-2]
    return found


def encode_with_vae(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the normalized mode of the VAE's distribution of an image, (1, 16,
    height / 8, width / 8) fp32.
    """
    pixels = images_to_tensor([image]).to(device, dtype)
    mode: Tensor = vae.encode(pixels).latent_dist.mode().float()
    return (mode - vae.config.shift_factor) * vae.config.scaling_factor
