"""FLUX's units: prompt and images to conditions, and latents to an image."""

import math
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

from dstrain_flux.model_fn import DOWNSCALE, PATCH

CLIP_TOKENS = 77
T5_TOKENS = 512
SCHNELL_TOKENS = 256
"""Tokens of a prompt that T5 encodes for FLUX.1-schnell (its model card, and
flux/util.py of black-forest-labs/flux).
"""
KONTEXT_PIXELS = 1024 * 1024
"""Area of each of KONTEXT_SIZES, about."""
KONTEXT_SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
"""(width, height) of the images that Kontext was trained on
(PREFERRED_KONTEXT_RESOLUTIONS of diffusers).
"""


class Pooled(TypedDict):
    """A prompt, encoded by CLIP."""

    pooled_emb: Tensor
    """(1, channels), the text encoder's dtype."""


class Prompt(TypedDict):
    """A prompt, encoded by T5 with its padding, since the denoiser knows no mask."""

    prompt_emb: Tensor
    """(1, 512 or 256, channels), the text encoder's dtype."""


class Latents(TypedDict):
    """An image in the VAE's latent space, normalized."""

    input_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32."""


class KontextImages(TypedDict):
    """The images to edit, RGB, at sizes that the denoiser knows."""

    resized_kontext_images: list[Image.Image]


class KontextLatents(TypedDict):
    """The images to edit in the VAE's latent space, normalized."""

    kontext_latents: list[Tensor]
    """Each (1, 16, height / 8, width / 8), fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_clip(
    prompt: str, *, text_encoder_1: Any, tokenizer_1: Any, device: torch.device
) -> Pooled:
    """Encode a prompt of 77 tokens at most as CLIP's state at its end."""
    # The rest of the prompt reaches the denoiser through T5.
    check_length(tokenizer_1, prompt, CLIP_TOKENS, "CLIP", usual=True)
    tokens = _tokens(prompt, tokenizer_1, CLIP_TOKENS).to(device)
    return {"pooled_emb": text_encoder_1(tokens).pooler_output}


@versioned(1)
def encode_prompt(
    prompt: str, *, text_encoder_2: Any, tokenizer_2: Any, device: torch.device
) -> Prompt:
    """Encode a prompt, padded to 512 tokens, as T5's last hidden states."""
    return _encode_by_t5(prompt, T5_TOKENS, text_encoder_2, tokenizer_2, device)


@versioned(1)
def encode_schnell_prompt(
    prompt: str, *, text_encoder_2: Any, tokenizer_2: Any, device: torch.device
) -> Prompt:
    """Encode a prompt as `encode_prompt` does, padded to 256 tokens."""
    return _encode_by_t5(prompt, SCHNELL_TOKENS, text_encoder_2, tokenizer_2, device)


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16, as the mode of the VAE's
    distribution.
    """
    pixels = images_to_tensor([input_image])
    return {"input_latents": encode_pixels(pixels, vae, device, dtype)}


@versioned(1)
def resize_kontext(
    kontext_images: list[Image.Image], kontext_pixels: int
) -> KontextImages:
    """Resize each image to edit as `kontext_size` says."""
    resized = []
    for image in kontext_images:
        size = kontext_size(*image.size, kontext_pixels)
        rgb = convert_image(image, "RGB")
        resized.append(rgb.resize(size, Image.Resampling.LANCZOS))
    return {"resized_kontext_images": resized}


@versioned(1)
def encode_kontext(
    resized_kontext_images: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> KontextLatents:
    """Encode RGB images to edit, each as `encode_image` does."""
    pixels = [images_to_tensor([image]) for image in resized_kontext_images]
    return {
        "kontext_latents": [encode_pixels(one, vae, device, dtype) for one in pixels]
    }


def kontext_size(width: int, height: int, pixels: int) -> tuple[int, int]:
    """Return (width, height) of the published size nearest in shape, scaled to an area,
    in multiples of 16.

    For the published area this is what FluxKontextPipeline of diffusers does.
    """
    multiple = DOWNSCALE * PATCH
    ratio = max(width // multiple, 1) / max(height // multiple, 1)
    near = min(KONTEXT_SIZES, key=lambda size: abs(ratio - size[0] / size[1]))
    scale = math.sqrt(pixels / KONTEXT_PIXELS) / multiple
    columns, rows = (max(round(side * scale), 1) for side in near)
    return columns * multiple, rows * multiple


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 16, height / 8, width / 8), to an RGB image."""
    latents = latents.to(vae.device, torch.float32)
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    pixels = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
    return {"image": tensor_to_image(pixels)}


def _encode_by_t5(
    prompt: str,
    length: int,
    text_encoder_2: Any,
    tokenizer_2: Any,
    device: torch.device,
) -> Prompt:
    check_length(tokenizer_2, prompt, length, "T5")
    tokens = _tokens(prompt, tokenizer_2, length).to(device)
    return {"prompt_emb": text_encoder_2(tokens).last_hidden_state}


def _tokens(prompt: str, tokenizer: Any, length: int) -> Tensor:
    """Return the ids of a prompt cut or padded to a length, (1, length)."""
    tokens = tokenizer(
        [prompt],
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    ids: Tensor = tokens.input_ids
    return ids


def encode_pixels(
    pixels: Tensor, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Encode an image, (1, 3, height, width) in -1 to 1, as the mode of the VAE's
    distribution, normalized, (1, 16, height / 8, width / 8) fp32.
    """
    given = pixels.to(device, dtype)
    mode: Tensor = vae.encode(given).latent_dist.mode().float()
    return (mode - vae.config.shift_factor) * vae.config.scaling_factor
