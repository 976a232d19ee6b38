"""SDXL's units: prompt and image to conditions and latents, and latents to an image."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, versioned
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

    inpaint_latents: Tensor
    """(1, 5, height / 8, width / 8), fp32: 1 where it is to be painted, else 0, and the
    image's latents, where masked pixels are grey."""


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
    """Encode a prompt of 77 tokens at most, as `_encode` does."""
    check_length(tokenizer, prompt, MAX_TOKENS, "CLIP")
    given = (tokenizer, text_encoder, device, branch)
    return {"clip_emb": _encode(prompt, clip_skip, *given)[0]}


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
    """Encode a prompt as `encode_prompt` does, with its projected state at the end."""
    given = (tokenizer_2, text_encoder_2, device, branch)
    hidden, pooled = _encode(prompt, clip_skip, *given)
    return {"open_clip_emb": hidden, "pooled_emb": pooled}


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
    """Return the sizes of the image; its original one is its own where none is given."""
    original = [original_height or height, original_width or width]
    ids = [[*original, crop_top, crop_left, height, width]]
    return {"size_ids": torch.tensor(ids, dtype=torch.float32, device=device)}


@versioned(2)
def encode_image(input_image: Image.Image, *, vae: Any, device: Any) -> Latents:
    """Encode an RGB image, its sides multiples of 8, as the mode of the VAE."""
    pixels = images_to_tensor([input_image])
    return {"input_latents": _encode_pixels(pixels, vae, device)}


@versioned(2)
def encode_inpaint(
    inpaint_image: Image.Image,
    inpaint_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
) -> Inpaint:
    """Encode an image and its mask as StableDiffusionXLInpaintPipeline of diffusers does,
    but for the mode of the VAE's distribution in place of a sample.
    """
    image, mask = (
        images_to_tensor([convert_image(one, "RGB").resize((width, height), LANCZOS)])
        for one in (inpaint_image, inpaint_mask)
    )
    is_masked = mask[:, :1] >= 0
    latents = _encode_pixels(image * ~is_masked, vae, device)
    mask_latents = is_masked[..., ::DOWNSCALE, ::DOWNSCALE].to(latents)
    return {"inpaint_latents": torch.cat([mask_latents, latents], dim=1)}


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 4, height / 8, width / 8), to an RGB image."""
    scaled = latents.to(vae.device, torch.float32) / vae.config.scaling_factor
    pixels = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
    return {"image": tensor_to_image(pixels)}


def _encode_pixels(pixels: Tensor, vae: Any, device: torch.device) -> Tensor:
    """Encode an image, (1, 3, height, width) in -1 to 1, as the mode of the VAE's
    distribution, scaled, (1, 4, height / 8, width / 8) fp32.
    """
    mode: Tensor = vae.encode(pixels.to(device, vae.dtype)).latent_dist.mode()
    return mode.float() * vae.config.scaling_factor


def _encode(
    prompt: str, clip_skip: int, tokenizer: Any, encoder: Any, device: Any, branch: str
) -> tuple[Tensor, Tensor]:
    """Return the states of a layer for a prompt that is cut or padded to 77 tokens, and
    what the text encoder makes of it; zeros for a blank negative one, as the published
    force_zeros_for_empty_prompt has it.
    """
    padded = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True}
    tokens = tokenizer([prompt], return_tensors="pt", **padded).to(device)
    encoded = encoder(tokens.input_ids, output_hidden_states=True)
    if clip_skip > len(encoded.hidden_states):
        raise InputError("clip_skip", f"is {clip_skip}, more than there are layers")
    hidden = encoded.hidden_states[-clip_skip]
    if clip_skip > 2:  # so that all layers that are trained have a gradient
        hidden = hidden + 0 * encoded[0].mean()
    factor = float(bool(prompt) or branch != "negative")
    return hidden * factor, encoded[0] * factor
