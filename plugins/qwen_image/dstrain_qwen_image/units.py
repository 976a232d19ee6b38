"""Qwen-Image's units: prompt and picture -> what the denoiser reads, and latents ->
picture.
"""

from math import sqrt
from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError
from dstrain.plugin.functional import (
    convert_image,
    images_to_tensor,
    latents_mean_std,
    tensor_to_image,
)
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.processor import IMAGE_TOKEN

PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34
"""Tokens of PREFIX, whose embeddings are dropped (QwenImagePipeline of diffusers,
`prompt_template_encode`).
"""
MAX_TOKENS = 4096
"""Tokens of a prompt and SUFFIX that are kept, those of pictures among them."""

EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
EDIT_PREFIX_TOKENS = 64
"""Tokens of EDIT_PREFIX, whose embeddings are dropped (QwenImageEditPipeline of
diffusers).
"""
IMAGE = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
NUMBERED_IMAGE = f"Picture {{}}: {IMAGE}"
"""How a prompt about several pictures begins, once for each (QwenImageEditPlusPipeline
of diffusers).
"""
EDIT_MULTIPLE = 32
"""Of what the sides of resized edit pictures are multiples (`calculate_dimensions` in
diffusers).
"""


class Prompt(TypedDict):
    """A prompt as the denoiser reads it."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_mask: Tensor
    """(1, tokens), bool."""


class Latents(TypedDict):
    """A picture in the VAE's latent space, normalised per channel."""

    input_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32."""


class EditImages(TypedDict):
    """The pictures to be edited as text encoder and VAE see them, where both see the
    same.
    """

    edit_pictures: list[Image.Image]
    """About `edit_pixels` pixels each."""


class EditImagesInTwoSizes(EditImages):
    """The pictures to be edited as the VAE sees them, and as the text encoder does."""

    edit_text_pictures: list[Image.Image]
    """About `edit_text_pixels` pixels each."""


class EditLatents(TypedDict):
    """The pictures to be edited in the VAE's latent space, normalised per channel."""

    edit_latents: list[Tensor]
    """(1, 16, 1, height / 8, width / 8) each, fp32."""


class DecodedImage(TypedDict):
    """A generated picture."""

    image: Image.Image


def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Text -> the text encoder's last hidden states, without those of the chat
    template's prefix.

    Raises InputError when the tokenizer does not turn the prefix into 34 tokens: it is
    then another model's.
    """
    check_prefix(tokenizer, PREFIX, PREFIX_TOKENS, "tokenizer")
    text = PREFIX + prompt + SUFFIX
    tokens = tokenizer(
        [text],
        max_length=PREFIX_TOKENS + MAX_TOKENS,
        truncation=True,
        return_tensors="pt",
    ).to(device)
    # The language model alone: its head would compute a score for each of 152,064
    # words, which nothing reads.
    outputs = text_encoder.model(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        use_cache=False,
    )
    return {
        "prompt_emb": outputs.last_hidden_state[:, PREFIX_TOKENS:],
        "prompt_mask": tokens.attention_mask[:, PREFIX_TOKENS:].bool(),
    }


def resize_edit_image(edit_image: Image.Image, edit_pixels: int) -> EditImages:
    """Resize the one picture to be edited to about `edit_pixels` pixels."""
    return {"edit_pictures": [resize(edit_image, edit_pixels)]}


def resize_edit_images(
    edit_image: list[Image.Image], edit_pixels: int, edit_text_pixels: int
) -> EditImagesInTwoSizes:
    """Resize each picture to be edited to about `edit_pixels` pixels, and again to
    about `edit_text_pixels`.
    """
    return {
        "edit_pictures": [resize(image, edit_pixels) for image in edit_image],
        "edit_text_pictures": [resize(image, edit_text_pixels) for image in edit_image],
    }


def resize(image: Image.Image, pixels: int) -> Image.Image:
    """Resize a picture, keeping its aspect ratio but for the rounding, to about
    `pixels` pixels in multiples of 32.

    Raises InputError where a side would be rounded to nothing. Source:
    `calculate_dimensions` of diffusers.
    """
    ratio = image.width / image.height
    exact = sqrt(pixels * ratio)
    width, height = (
        round(side / EDIT_MULTIPLE) * EDIT_MULTIPLE for side in (exact, exact / ratio)
    )
    if not width or not height:
        size = f"{image.width} x {image.height} (width x height)"
        raise InputError(
            "edit_image",
            f"{size} is too long for {pixels} pixels in multiples of {EDIT_MULTIPLE}",
        )
    return convert_image(image, "RGB").resize((width, height), Image.Resampling.LANCZOS)


def encode_edit_prompt(
    prompt: str,
    edit_pictures: list[Image.Image],
    *,
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    """Text and the picture it is about -> hidden states of the picture's and the text's
    tokens.
    """
    return _encode_with_images(
        IMAGE + prompt, edit_pictures, text_encoder, processor, device
    )


def encode_numbered_prompt(
    prompt: str,
    edit_text_pictures: list[Image.Image],
    *,
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    """Text that speaks of 'Picture 1', 'Picture 2' ..., and these -> hidden states of
    all their tokens.
    """
    images = "".join(
        NUMBERED_IMAGE.format(number)
        for number, _ in enumerate(edit_text_pictures, start=1)
    )
    return _encode_with_images(
        images + prompt, edit_text_pictures, text_encoder, processor, device
    )


def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """RGB picture -> the mode of the VAE's distribution, normalised in fp32; sides are
    multiples of 16.
    """
    return {"input_latents": _encode_image(input_image, vae, device, dtype)}


def encode_edit_images(
    edit_pictures: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditLatents:
    """RGB pictures to be edited -> the modes of the VAE's distributions, normalised in
    fp32.
    """
    return {
        "edit_latents": [
            _encode_image(image, vae, device, dtype) for image in edit_pictures
        ]
    }


def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Latents, (1, 16, 1, height / 8, width / 8) -> RGB picture."""
    latents = latents.to(vae.device, torch.float32)
    mean, std = latents_mean_std(vae.config, latents)
    # Not latents * std: diffusers divides, and then the pixels are equal, too.
    pixels = vae.decode((latents / (1 / std) + mean).to(vae.dtype), return_dict=False)[
        0
    ]
    return {"image": tensor_to_image(pixels[:, :, 0])}


def check_prefix(tokenizer: Any, prefix: str, wanted: int, component: str) -> None:
    """Raise InputError when a tokenizer does not turn a chat template's prefix into the
    number of tokens dropped.
    """
    found = len(tokenizer(prefix).input_ids)
    if found != wanted:
        what = f"turns the chat template's prefix into {found} tokens, want {wanted}"
        raise InputError(
            f"{component} {tokenizer.name_or_path}",
            what,
            f"give Qwen-Image's {component} with --{component}_path",
        )


def _encode_with_images(
    text: str,
    images: list[Image.Image],
    text_encoder: Any,
    processor: Any,
    device: torch.device,
) -> Prompt:
    """Text with pictures in it -> the last hidden states, without those of the edit
    template's prefix.
    """
    check_prefix(processor.tokenizer, EDIT_PREFIX, EDIT_PREFIX_TOKENS, "processor")
    read = processor(
        EDIT_PREFIX + text + SUFFIX, images, EDIT_PREFIX_TOKENS + MAX_TOKENS
    )
    outputs = text_encoder.model(
        **{name: value.to(device) for name, value in read.items()}, use_cache=False
    )
    return {
        "prompt_emb": outputs.last_hidden_state[:, EDIT_PREFIX_TOKENS:],
        "prompt_mask": read["attention_mask"][:, EDIT_PREFIX_TOKENS:].bool().to(device),
    }


def _encode_image(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    pixels = images_to_tensor([image]).to(device, dtype)
    mode = vae.encode(pixels[:, :, None]).latent_dist.mode().float()
    mean, std = latents_mean_std(vae.config, mode)
    normalised: Tensor = (mode - mean) / std
    return normalised
