"""Units of Z-Image-Omni-Base: a prompt and any number of images to edit."""

import math
from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, versioned
from dstrain.plugin.functional import check_length, convert_image
from PIL import Image
from torch import Tensor

from dstrain_z_image.model_fn import SIDE_MULTIPLE, cropped_sides
from dstrain_z_image.units import (
    MAX_TOKENS,
    PREFIX,
    SUFFIX,
    encode_text,
    encode_with_vae,
)

IMAGE_BEGINS, IMAGE_ENDS = "<|vision_start|>", "<|vision_end|>"
TEXT_ENDS = "<|im_end|>"


class EditImages(TypedDict):
    """Images to edit."""

    resized_edit_images: list[Image.Image]
    """RGB, `edit_pixels` pixels each at most."""
    edit_count: int


class Texts(TypedDict):
    """A prompt among the texts that images stand between, each encoded alone."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_parts: Tensor
    """(1, tokens), integer: the number of the text that a token is of, from 1."""


class EditLatents(TypedDict):
    """Images to edit in the VAE's latent space, normalized."""

    edit_latents: list[Tensor]
    """(1, 16, height / 8, width / 8) each, fp32."""


class EditEmbeddings(TypedDict):
    """Images to edit, encoded by SigLIP."""

    edit_embs: list[Tensor]
    """(1, rows, columns, channels) each, the image encoder's dtype."""


@versioned(1)
def resize_edit_images(edit_image: list[Image.Image], edit_pixels: int) -> EditImages:
    """Scale images of more than `edit_pixels` pixels down to as many, as
    ZImageOmniPipeline of diffusers does.

    Raises InputError where a side is less than 16 pixels then.
    """
    resized = []
    for image in edit_image:
        scale = min(1.0, math.sqrt(edit_pixels / (image.width * image.height)))
        size = (int(image.width * scale), int(image.height * scale))
        if min(size) < SIDE_MULTIPLE:
            what = f"{image.width} x {image.height} is too small or too elongated"
            least = f"sides need {SIDE_MULTIPLE} pixels, at {edit_pixels} in all"
            raise InputError("edit_image", what, least)
        image = convert_image(image, "RGB")
        if size != image.size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        resized.append(image)
    return {"resized_edit_images": resized, "edit_count": len(resized)}


@versioned(1)
def encode_texts(
    prompt: str,
    edit_count: int = 0,
    *,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
) -> Texts:
    """Encode each of the texts before, between and after images."""
    texts = [PREFIX + prompt + SUFFIX]
    if edit_count:
        texts = [
            PREFIX + IMAGE_BEGINS,
            *[IMAGE_ENDS + IMAGE_BEGINS] * (edit_count - 1),
            IMAGE_ENDS + prompt + SUFFIX + IMAGE_BEGINS,
            IMAGE_ENDS + TEXT_ENDS,
        ]
    states, parts = [], []
    for number, text in enumerate(texts, 1):
        check_length(tokenizer, text, MAX_TOKENS, "Z-Image")
        states.append(encode_text(text, text_encoder, tokenizer, device))
        parts += [number] * states[-1].shape[1]
    return {
        "prompt_emb": torch.cat(states, dim=1),
        "prompt_parts": torch.tensor([parts], device=device),
    }


@versioned(1)
def encode_edit_images(
    resized_edit_images: list[Image.Image],
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditLatents:
    """Encode the middle of each image, its sides multiples of 16, with the VAE."""
    latents = []
    for image in resized_edit_images:
        height, width = cropped_sides(image)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        middle = image.crop((left, top, left + width, top + height))
        latents.append(encode_with_vae(middle, vae, device, dtype))
    return {"edit_latents": latents}


@versioned(1)
def embed_edit_images(
    resized_edit_images: list[Image.Image], *, image_encoder: Any, device: torch.device
) -> EditEmbeddings:
    """Encode images with SigLIP, in as many patches as it has at most."""
    from transformers import Siglip2ImageProcessorPil

    config = image_encoder.config
    processor = Siglip2ImageProcessorPil(
        patch_size=config.patch_size, max_num_patches=config.num_patches
    )
    embeddings = []
    for image in resized_edit_images:
        patches = processor(images=[image], return_tensors="pt").to(device)
        rows, columns = patches["spatial_shapes"][0].tolist()
        states = image_encoder(**patches).last_hidden_state
        embeddings.append(states[:, : rows * columns].unflatten(1, (rows, columns)))
    return {"edit_embs": embeddings}
