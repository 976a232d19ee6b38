"""FLUX.2's units: prompt and images to conditions, and latents to an image."""

import math
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

from dstrain_flux2.model_fn import DOWNSCALE

TOKENS = 512
"""Tokens that a prompt with its template is cut or padded to (black-forest-labs/flux2,
src/flux2/text_encoder.py).
"""
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses "
    "focusing on object relationships, object\nattribution and actions without speculation."
)
"""What Mistral is told first (src/flux2/system_messages.py there)."""
IMAGE_MARK = "[IMG]"
"""What Mistral's processor would take for an image; it is left out of prompts."""
QUARTERS = (1, 2, 3)
"""Quarters of a text encoder's depth after which its states are taken: after the 10th,
20th and 30th of Mistral's 40 layers, the 9th, 18th and 27th of Qwen3's 36.
"""


class Prompt(TypedDict):
    """An encoded prompt with its padding, since the denoiser knows no mask."""

    prompt_emb: Tensor
    """(1, 512, 3 * channels), the text encoder's dtype."""


class Latents(TypedDict):
    """An image as the denoiser sees it."""

    input_latents: Tensor
    """(1, 128, height / 16, width / 16), fp32."""


class EditImages(TypedDict):
    """Reference images, RGB, their sides multiples of 16."""

    resized_edit_images: list[Image.Image]


class EditLatents(TypedDict):
    """Reference images as the denoiser sees them."""

    edit_latents: list[Tensor]
    """Each (1, 128, height / 16, width / 16), fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_mistral_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt, after a system message, as states of three of Mistral's layers."""
    told = prompt.replace(IMAGE_MARK, "")
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("system", SYSTEM_MESSAGE), ("user", told))
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return _encode(text, told, "Mistral", text_encoder, tokenizer, device)


@versioned(1)
def encode_qwen_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt, with an answer begun without thoughts, as states of three of
    Qwen3's layers.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    return _encode(text, prompt, "Qwen3", text_encoder, tokenizer, device)


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16, as the mode of the VAE's
    distribution.
    """
    return {"input_latents": encode_with_vae(input_image, vae, device, dtype)}


@versioned(1)
def resize_edit_images(
    edit_image: list[Image.Image], edit_pixels: int, single_edit_pixels: int
) -> EditImages:
    """Scale reference images down to an area, a single one to its own, and crop them to
    multiples of 16.
    """
    pixels = single_edit_pixels if len(edit_image) == 1 else edit_pixels
    return {"resized_edit_images": [resize(image, pixels) for image in edit_image]}


@versioned(1)
def encode_edit_images(
    resized_edit_images: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditLatents:
    """Encode reference images, each as `encode_image` does."""
    return {
        "edit_latents": [
            encode_with_vae(image, vae, device, dtype) for image in resized_edit_images
        ]
    }


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 128, height / 16, width / 16), to an RGB image."""
    mean, deviation = _statistics(vae)
    own = latents.to(vae.device, torch.float32) * deviation + mean
    own = torch.nn.functional.pixel_shuffle(own, 2)
    pixels = vae.decode(own.to(vae.dtype), return_dict=False)[0]
    return {"image": tensor_to_image(pixels)}


def resize(image: Image.Image, pixels: int) -> Image.Image:
    """Return an RGB image scaled down to an area in pixels, if it is larger, and cropped
    to multiples of 16 around its middle (default_prep of black-forest-labs/flux2).

    Raises InputError where a side is too short.
    """
    width, height = image.size
    if width * height > pixels:
        scale = math.sqrt(pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    inner = [side // DOWNSCALE * DOWNSCALE for side in (width, height)]
    if not all(inner):
        what = f"is {image.width} x {image.height} (width x height)"
        want = f"expected {DOWNSCALE} or more on each side within {pixels} pixels"
        raise InputError("edit_image", what, want)
    scaled = convert_image(image, "RGB")
    if scaled.size != (width, height):
        scaled = scaled.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    return scaled.crop((left, top, left + inner[0], top + inner[1]))


def encode_with_vae(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Encode an RGB image as the mode of the VAE's distribution, in patches of 2x2, each
    channel normalized, (1, 128, height / 16, width / 16) fp32.
    """
    pixels = images_to_tensor([image]).to(device, dtype)
    mode: Tensor = vae.encode(pixels).latent_dist.mode().float()
    mean, deviation = _statistics(vae)
    return (torch.nn.functional.pixel_unshuffle(mode, 2) - mean) / deviation


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of patches, (1, 128, 1, 1) fp32."""
    shape = (1, -1, 1, 1)
    mean: Tensor = vae.bn.running_mean.float().view(shape)
    variance: Tensor = vae.bn.running_var.float().view(shape)
    return mean, torch.sqrt(variance + vae.config.batch_norm_eps)


def _encode(
    text: str,
    prompt: str,
    model: str,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
) -> Prompt:
    """Encode a chat template filled with a prompt."""
    before = tokenizer(text[: text.index(prompt)], add_special_tokens=False).input_ids
    limit = TOKENS - len(before) + tokenizer.num_special_tokens_to_add()
    check_length(tokenizer, prompt, limit, model)
    tokens = tokenizer(
        [text],
        add_special_tokens=False,
        padding="max_length",
        max_length=TOKENS,
        truncation=True,
        return_tensors="pt",
    ).to(device)
    # Without the head, which would compute a score for each word of the vocabulary.
    states = text_encoder.model(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    depth = text_encoder.config.get_text_config().num_hidden_layers
    chosen = [states[depth * quarter // 4] for quarter in QUARTERS]
    return {"prompt_emb": torch.cat(chosen, dim=-1)}
