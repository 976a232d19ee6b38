"""Layered variants: an image as a stack of transparent ones, a frame of latents each."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import InputError, versioned
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.control import ContextLatents
from dstrain_qwen_image.model_fn import latent_shape, predict_images
from dstrain_qwen_image.units import Latents, cover, decode, encode_with_vae


class LayerInputLatents(TypedDict):
    """The image that is taken apart in the VAE's latent space, normalized per channel."""

    layer_input_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32."""


class DecodedLayers(TypedDict):
    """The whole image, then its layers."""

    images: list[Image.Image]
    """RGBA."""


@versioned(1)
def encode_layers(
    input_image: list[Image.Image],
    layer_num: int | None = None,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Latents:
    """Encode the whole image and its layers, RGBA images of one size, as frames of the
    latents: (1, 16, 1 + layers, height / 8, width / 8).

    Raises InputError for images of several sizes, and for another number of layers than
    `layer_num`.
    """
    sizes = {image.size for image in input_image}
    if len(sizes) > 1:
        raise InputError("image", "the whole image and its layers differ in size")
    if layer_num is not None and len(input_image) != layer_num + 1:
        what = f"is {layer_num}, and the number of images is {len(input_image)}"
        raise InputError("layer_num", what, "expected the whole image and the layers")
    frames = [encode_with_vae(image, vae, device, dtype) for image in input_image]
    return {"input_latents": torch.cat(frames, dim=2)}


@versioned(1)
def encode_layer_input(
    layer_input_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerInputLatents:
    """Encode the image that is taken apart, cropped to the layers' aspect ratio."""
    image = cover(layer_input_image, height, width, "RGBA")
    return {"layer_input_latents": encode_with_vae(image, vae, device, dtype)}


@versioned(1)
def encode_layer_context(
    context_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ContextLatents:
    """Encode an image that says which layer is meant, such as a mask."""
    image = cover(context_image, height, width, "RGBA")
    return {"context_latents": encode_with_vae(image, vae, device, dtype)}


def predict_layers(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    layer_input_latents: Tensor,
    context_latents: Tensor | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, each frame as an image of its own; the tokens of the
    context image and of the one that is taken apart follow.

    The denoiser puts the last image, which is taken apart, below the others (its
    `use_layer3d_rope`); `additional_t_cond` says that they may be transparent.
    """
    frames = list(noisy_latents.split(1, dim=2))
    context = [] if context_latents is None else [context_latents]
    transparent = timestep.new_zeros(len(timestep), dtype=torch.long)
    return predict_images(
        [*frames, *context, layer_input_latents],
        len(frames),
        timestep,
        prompt_emb,
        prompt_mask,
        dit=dit,
        additional_t_cond=transparent,
    )


@versioned(1)
def latent_shape_layers(height: int, width: int, layer_num: int) -> tuple[int, ...]:
    """Return (1, 16, 1 + layer_num, height / 8, width / 8)."""
    batch, channels, _, *sides = latent_shape(height, width)
    return (batch, channels, 1 + layer_num, *sides)


@versioned(1)
def decode_layers(latents: Tensor, *, vae: Any) -> DecodedLayers:
    """Decode each frame of the latents to an RGBA image."""
    frames = latents.split(1, dim=2)
    return {"images": [decode(frame, vae=vae)["image"] for frame in frames]}
