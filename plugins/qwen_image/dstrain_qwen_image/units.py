"""Qwen-Image's units: prompt and images to conditions, and latents to an image."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, versioned
from dstrain.plugin.functional import (
    convert_image,
    cover_image,
    images_to_tensor,
    latents_mean_std,
    tensor_to_image,
)
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.model_fn import DOWNSCALE, PATCH
from dstrain_qwen_image.processor import IMAGE_TOKEN, tokenize

PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34
"""Tokens of PREFIX, whose embeddings are dropped (QwenImagePipeline of diffusers)."""
MAX_TOKENS = 4096
"""Tokens of a prompt and SUFFIX that are kept at most, those of images among them."""
TOKEN_PIXELS = DOWNSCALE * PATCH

EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
EDIT_PREFIX_TOKENS = 64
"""Tokens of EDIT_PREFIX, dropped alike (QwenImageEditPipeline of diffusers)."""
IMAGE = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
NUMBERED_IMAGE = f"Picture {{}}: {IMAGE}"
"""The beginning of a prompt, for each of several images (QwenImageEditPlusPipeline)."""
EDIT_MULTIPLE = 32
"""Sides of images to edit are multiples of it (`calculate_dimensions` of diffusers)."""


class Prompt(TypedDict):
    """An encoded prompt."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_mask: Tensor
    """(1, tokens), bool."""


class Latents(TypedDict):
    """An image in the VAE's latent space, normalized per channel."""

    input_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32."""


class EditImages(TypedDict):
    """Images to edit, as both the text encoder and the VAE get them."""

    resized_edit_images: list[Image.Image]
    """About `edit_pixels` pixels each."""


class EditImagesInTwoSizes(EditImages):
    """Images to edit, as the VAE and as the text encoder gets them."""

    resized_text_images: list[Image.Image]
    """About `edit_text_pixels` pixels each."""


class EditLatents(TypedDict):
    """Images to edit in the VAE's latent space, normalized per channel."""

    edit_latents: list[Tensor]
    """(1, 16, 1, height / 8, width / 8) each, fp32."""


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


def max_tokens(
    height: int | None, width: int | None, images: Sequence[Image.Image] = ()
) -> int:
    """Return how many tokens of text the denoiser has positions for, beside images of
    these sizes.

    Its 4096 positions are shared: text begins where half of the longest side of an
    image, in tokens, ends (QwenEmbedRope of diffusers).
    """
    sides = [height or 0, width or 0]
    for image in images:
        sides += image.size
    return MAX_TOKENS - max(sides) // TOKEN_PIXELS // 2


@versioned(1)
def encode_prompt(
    prompt: str,
    height: int | None = None,
    width: int | None = None,
    *,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
) -> Prompt:
    """Encode a prompt as the text encoder's last hidden states, as many as the denoiser
    has positions for beside an image of this size.
    """
    check_prefix(tokenizer, PREFIX, PREFIX_TOKENS, "tokenizer")
    kept = PREFIX_TOKENS + max_tokens(height, width)
    text = PREFIX + prompt + SUFFIX
    tokens = tokenize(tokenizer, text, kept, PREFIX_TOKENS, SUFFIX)
    return _encode_tokens(tokens, PREFIX_TOKENS, text_encoder, device)


@versioned(1)
def resize_edit_image(edit_image: Image.Image, edit_pixels: int) -> EditImages:
    """Resize the image to edit to about `edit_pixels` pixels."""
    return {"resized_edit_images": [resize(edit_image, edit_pixels)]}


@versioned(1)
def resize_edit_images(
    edit_image: list[Image.Image], edit_pixels: int, edit_text_pixels: int
) -> EditImagesInTwoSizes:
    """Resize each image to edit to both areas."""
    return {
        "resized_edit_images": [resize(image, edit_pixels) for image in edit_image],
        "resized_text_images": [
            resize(image, edit_text_pixels) for image in edit_image
        ],
    }


def resize(image: Image.Image, pixels: int) -> Image.Image:
    """Resize an image to about `pixels` pixels, with sides that are multiples of 32, as
    `calculate_dimensions` of diffusers does.

    Raises InputError where a side would be rounded to nothing.
    """
    ratio = image.width / image.height
    exact = sqrt(pixels * ratio)
    width = round(exact / EDIT_MULTIPLE) * EDIT_MULTIPLE
    height = round(exact / ratio / EDIT_MULTIPLE) * EDIT_MULTIPLE
    if not width or not height:
        size = f"{image.width} x {image.height} (width x height)"
        raise InputError(
            "edit_image",
            f"{size} is too elongated for {pixels} pixels in multiples of {EDIT_MULTIPLE}",
        )
    return convert_image(image, "RGB").resize((width, height), Image.Resampling.LANCZOS)


def cover(
    image: Image.Image, height: int, width: int, mode: str = "RGB"
) -> Image.Image:
    """Return an image in this mode, scaled and cropped to this size."""
    return cover_image(convert_image(image, mode), (height, width))


@versioned(1)
def encode_edit_prompt(
    prompt: str,
    resized_edit_images: list[Image.Image],
    height: int | None = None,
    width: int | None = None,
    *,
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    """Encode a prompt and the image that it is about."""
    text = IMAGE + prompt
    limit = max_tokens(height, width, resized_edit_images)
    return _encode_with_images(
        text, resized_edit_images, limit, text_encoder, processor, device
    )


@versioned(1)
def encode_numbered_prompt(
    prompt: str,
    resized_text_images: list[Image.Image],
    resized_edit_images: list[Image.Image] | None = None,
    height: int | None = None,
    width: int | None = None,
    *,
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    """Encode a prompt about 'Picture 1', 'Picture 2' ..., and these images."""
    numbers = range(1, len(resized_text_images) + 1)
    text = "".join(NUMBERED_IMAGE.format(number) for number in numbers) + prompt
    limit = max_tokens(height, width, resized_edit_images or ())
    return _encode_with_images(
        text, resized_text_images, limit, text_encoder, processor, device
    )


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16, as the mode of the VAE's
    distribution.
    """
    return {"input_latents": encode_with_vae(input_image, vae, device, dtype)}


@versioned(1)
def encode_edit_images(
    resized_edit_images: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditLatents:
    """Encode RGB images to edit, each as `encode_image` does."""
    return {
        "edit_latents": [
            encode_with_vae(image, vae, device, dtype) for image in resized_edit_images
        ]
    }


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 16, 1, height / 8, width / 8), to an RGB image."""
    latents = latents.to(vae.device, torch.float32)
    mean, std = latents_mean_std(vae.config, latents)
    # Not latents * std: diffusers divides, and then the pixels are equal, too.
    scaled = (latents / (1 / std) + mean).to(vae.dtype)
    pixels = vae.decode(scaled, return_dict=False)[0]
    return {"image": tensor_to_image(pixels[:, :, 0])}


def encode_with_vae(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the normalized mode of the VAE's distribution of an image, (1, 16, 1,
    height / 8, width / 8) fp32.
    """
    pixels = images_to_tensor([image]).to(device, dtype)
    mode = vae.encode(pixels[:, :, None]).latent_dist.mode().float()
    mean, std = latents_mean_std(vae.config, mode)
    normalized: Tensor = (mode - mean) / std
    return normalized


def check_prefix(tokenizer: Any, prefix: str, wanted: int, component: str) -> None:
    """Refuse a tokenizer that turns a chat template's prefix into another number of
    tokens than is dropped: it is another model's.
    """
    found = len(tokenizer(prefix).input_ids)
    if found != wanted:
        raise InputError(
            f"{component} {tokenizer.name_or_path}",
            f"turns the chat template's prefix into {found} tokens, expected {wanted}",
            f"give Qwen-Image's {component} with --{component}_path",
        )


def _encode_with_images(
    text: str,
    images: list[Image.Image],
    limit: int,
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    check_prefix(processor.tokenizer, EDIT_PREFIX, EDIT_PREFIX_TOKENS, "processor")
    text = EDIT_PREFIX + text + SUFFIX
    kept = EDIT_PREFIX_TOKENS + limit
    tokens = processor(text, images, kept, EDIT_PREFIX_TOKENS, SUFFIX)
    # By the encoder's own id of this token: where memory is planned without its tokenizer,
    # the toy's stands in, which has another.
    is_image = tokens["mm_token_type_ids"].bool()
    image_id = text_encoder.config.image_token_id
    tokens["input_ids"] = tokens["input_ids"].masked_fill(is_image, image_id)
    return _encode_tokens(tokens, EDIT_PREFIX_TOKENS, text_encoder, device)


def _encode_tokens(
    tokens: Mapping[str, Tensor], dropped: int, text_encoder: Any, device: torch.device
) -> Prompt:
    """Return the last hidden states, without those of the first `dropped` tokens."""
    inputs = {name: value.to(device) for name, value in tokens.items()}
    # The language model alone: its head would compute a score for each of 152,064
    # words, which nothing reads.
    states = text_encoder.model(**inputs, use_cache=False).last_hidden_state
    return {
        "prompt_emb": states[:, dropped:],
        "prompt_mask": inputs["attention_mask"][:, dropped:].bool(),
    }
