"""Z-Image's units: prompt and images to conditions, and latents to an image."""

import math
from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, functional, versioned
from PIL import Image
from torch import Tensor

from dstrain_z_image.model_fn import SIDE_MULTIPLE

PREFIX, SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
"""What Qwen3's chat template puts around a prompt, with thinking enabled."""
BEGINS, ENDS = "<|vision_start|>", "<|vision_end|>"
MAX_TOKENS = 512
EDIT_PIXELS = 1024 * 1024
"""Tokens of a text, and pixels of an image to edit, at most (diffusers)."""


class Prompt(TypedDict):
    """A prompt, or it among texts around images to edit, each encoded alone."""

    prompt_emb: Tensor
    """(1, tokens, channels), the text encoder's dtype."""
    prompt_parts: Tensor
    """(1, tokens), integers: the number of the text of a token, from 1."""


class Latents(TypedDict):
    """An image in the VAE's latent space, normalized: (1, 16, height / 8, width / 8), fp32."""

    input_latents: Tensor


class ControlLatents(TypedDict):
    """A control image, as an image is in `Latents`."""

    control_latents: Tensor


class EditImages(TypedDict):
    """Images to edit as `Latents`, and as SigLIP's states, (1, rows, columns, channels)."""

    edit_latents: list[Tensor]
    edit_embs: list[Tensor]


class DecodedImage(TypedDict):
    """A generated image."""

    image: Image.Image


@versioned(1)
def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt in its chat template."""
    return encode_texts([f"{PREFIX}{prompt}{SUFFIX}"], text_encoder, tokenizer, device)


@versioned(1)
def encode_edit_prompt(
    prompt: str,
    edit_image: list[Image.Image] | None = None,
    *,
    text_encoder: Any,
    tokenizer: Any,
    device: torch.device,
) -> Prompt:
    """Encode a prompt, and the texts before, between and after images to edit."""
    texts = [f"{PREFIX}{prompt}{SUFFIX}"]
    if edit_image:
        between = [f"{ENDS}{BEGINS}"] * (len(edit_image) - 1)
        last = (f"{ENDS}{prompt}{SUFFIX}{BEGINS}", f"{ENDS}<|im_end|>")
        texts = [f"{PREFIX}{BEGINS}", *between, *last]
    return encode_texts(texts, text_encoder, tokenizer, device)


def encode_texts(
    texts: list[str], text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode the first 512 tokens of each text as the last hidden states but one."""
    states, parts = [], []
    for number, text in enumerate(texts, 1):
        functional.check_length(tokenizer, text, MAX_TOKENS, "Z-Image")
        ids = tokenizer(text, truncation=True, max_length=MAX_TOKENS).input_ids
        # The encoder is causal, so that padding changes nothing; its head is left out.
        given = {"output_hidden_states": True, "use_cache": False}
        made = text_encoder.model(torch.tensor([ids], device=device), **given)
        states.append(made.hidden_states[-2])
        parts += [number] * len(ids)
    prompt_parts = torch.tensor([parts], device=device)
    return {"prompt_emb": torch.cat(states, dim=1), "prompt_parts": prompt_parts}


@versioned(1)
def encode_image(
    input_image: Image.Image, *, vae: Any, device: torch.device, dtype: torch.dtype
) -> Latents:
    """Encode an RGB image, its sides multiples of 16."""
    return {"input_latents": encode_with_vae(input_image, vae, device, dtype)}


@versioned(1)
def encode_control_image(
    controlnet_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ControlLatents:
    """Encode a control image at the size of the image to generate."""
    image = controlnet_image.resize((width, height), Image.Resampling.LANCZOS)
    return {"control_latents": encode_with_vae(image, vae, device, dtype)}


@versioned(1)
def encode_edit_images(
    edit_image: list[Image.Image],
    *,
    vae: Any,
    image_encoder: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> EditImages:
    """Encode images whole with SigLIP, and with the VAE in multiples of 16 pixels."""
    from transformers import Siglip2ImageProcessorPil

    see = Siglip2ImageProcessorPil(max_num_patches=image_encoder.config.num_patches)
    latents, embeddings = [], []
    for image in map(scaled_down, edit_image):
        patches = see([image], return_tensors="pt").to(device)
        rows, columns = patches["spatial_shapes"][0].tolist()
        states = image_encoder(**patches).last_hidden_state[:, : rows * columns]
        embeddings.append(states.unflatten(1, (rows, columns)))
        left, top = (side % SIDE_MULTIPLE // 2 for side in image.size)
        width, height = (side - side % SIDE_MULTIPLE for side in image.size)
        middle = image.crop((left, top, left + width, top + height))
        latents.append(encode_with_vae(middle, vae, device, dtype))
    return {"edit_latents": latents, "edit_embs": embeddings}


def scaled_down(image: Image.Image) -> Image.Image:
    """Return an RGB image of a megapixel at most; raises InputError for a side below 16."""
    scale = min(1.0, math.sqrt(EDIT_PIXELS / math.prod(image.size)))
    size = [int(side * scale) for side in image.size]
    if min(size) < SIDE_MULTIPLE:
        what = f"is too narrow: {image.width} x {image.height}"
        raise InputError("edit_image", what, f"give sides of {SIDE_MULTIPLE} or more")
    return image.resize(size, Image.Resampling.LANCZOS)


def edited_size(images: list[Image.Image]) -> dict[str, int]:
    """Return the sides of the last image, scaled down: diffusers' default."""
    width, height = (one - one % SIDE_MULTIPLE for one in scaled_down(images[-1]).size)
    return {"height": height, "width": width}


def encode_with_vae(
    image: Image.Image, vae: Any, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the normalized mode of the VAE's distribution of an image, in fp32."""
    pixels = functional.images_to_tensor([image]).to(device, dtype)
    mode: Tensor = vae.encode(pixels).latent_dist.mode().float()
    return (mode - vae.config.shift_factor) * vae.config.scaling_factor


@versioned(1)
def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
    """Decode latents, (1, 16, height / 8, width / 8), to an RGB image."""
    own = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
    pixels = vae.decode(own + vae.config.shift_factor, return_dict=False)[0]
    return {"image": functional.tensor_to_image(pixels)}
