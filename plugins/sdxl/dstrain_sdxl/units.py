"""SDXL's units: prompt and image to conditions and latents, and latents to an image."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import (
    check_length,
    convert_image,
    images_to_tensor,
    tensor_to_image,
)
from PIL import Image
from torch import Tensor

from dstrain_sdxl.model_fn import DOWNSCALE

LANCZOS = Image.Resampling.LANCZOS

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


class Inpaint(TypedDict):
    """An image of which a part is to be painted."""

    masked_latents: Tensor
    """(1, 4, height / 8, width / 8), fp32: masked pixels are grey."""
    mask_latents: Tensor
    """(1, 1, height / 8, width / 8), bool: true where it is to be painted."""


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
    hidden = _encode(prompt, tokenizer, text_encoder, device).hidden_states[-clip_skip]
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
    encoded = _encode(prompt, tokenizer_2, text_encoder_2, device)
    factor = _is_encoded(prompt, branch)
    return {
        "open_clip_emb": encoded.hidden_states[-clip_skip] * factor,
        "pooled_emb": encoded.text_embeds * factor,
    }


@versioned(1)
def encode_sizes(
    height: int,
    width: int,
    original_height: int | None = None,
    original_width: int | None = None,
    crop_top: int = 0,
    crop_left: int = 0,
    *,
    device: torch.device,
) -> SizeIds:
    """Return the sizes of the image in the order in which the denoiser reads them; its
    original size is its size where none is given.
    """
    original = [original_height or height, original_width or width]
    ids = [[*original, crop_top, crop_left, height, width]]
    return {"size_ids": torch.tensor(ids, dtype=torch.float32, device=device)}


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 8, as the mode of the VAE's
    distribution.
    """
    pixels = images_to_tensor([input_image])
    return {"input_latents": _encode_pixels(pixels, vae, device, dtype)}


@versioned(1)
def encode_inpaint(
    inpaint_image: Image.Image,
    inpaint_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Inpaint:
    """Encode an image and its mask as StableDiffusionXLInpaintPipeline of diffusers does,
    but for the mode of the VAE's distribution in place of a sample.
    """
    image, mask = (
        images_to_tensor([convert_image(one, "RGB").resize((width, height), LANCZOS)])
        for one in (inpaint_image, inpaint_mask)
    )
    is_masked = mask[:, :1] >= 0
    return {
        "masked_latents": _encode_pixels(image * ~is_masked, vae, device, dtype),
        "mask_latents": is_masked[..., ::DOWNSCALE, ::DOWNSCALE].to(device),
    }


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 4, height / 8, width / 8), to an RGB image."""
    scaled = latents.to(vae.device, torch.float32) / vae.config.scaling_factor
    pixels = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
    return {"image": tensor_to_image(pixels)}


def _encode_pixels(
    pixels: Tensor, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Encode an image, (1, 3, height, width) in -1 to 1, as the mode of the VAE's
    distribution, scaled, (1, 4, height / 8, width / 8) fp32.
    """
    mode: Tensor = vae.encode(pixels.to(device, dtype)).latent_dist.mode()
    return mode.float() * vae.config.scaling_factor


def _is_encoded(prompt: str, branch: str) -> float:
    """Return 0 where a prompt is blank and of the negative branch, else 1."""
    return float(bool(prompt) or branch != "negative")


def _encode(prompt: str, tokenizer: Any, text_encoder: Any, device: Any) -> Any:
    """Return the states of all layers for a prompt that is cut or padded to 77 tokens."""
    padded = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True}
    tokens = tokenizer([prompt], return_tensors="pt", **padded).to(device)
    return text_encoder(tokens.input_ids, output_hidden_states=True)
