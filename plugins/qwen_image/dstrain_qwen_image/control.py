"""Variants that a conditioning image steers: its unit, and the call of the denoiser."""

from typing import Any, TypedDict

import numpy as np
import torch
from dstrain.plugin import InputError, versioned
from dstrain.plugin.functional import around_blocks
from PIL import Image
from torch import Tensor

from dstrain_qwen_image.model_fn import DOWNSCALE, pack, predict, predict_edit
from dstrain_qwen_image.units import cover, encode_with_vae


class ControlLatents(TypedDict):
    """A conditioning image in the VAE's latent space, normalized per channel."""

    control_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32; the mask of an inpainting ControlNet is
    a channel more.
    """


class ContextLatents(TypedDict):
    """An image beside the generated one in the VAE's latent space, normalized per
    channel.
    """

    context_latents: Tensor
    """(1, 16, 1, height / 8, width / 8), fp32."""


@versioned(1)
def encode_control_image(
    blockwise_controlnet_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ControlLatents:
    """Encode a conditioning image, such as edges or depths, cropped to the generated
    image's aspect ratio.
    """
    image = cover(blockwise_controlnet_image, height, width)
    return {"control_latents": encode_with_vae(image, vae, device, dtype)}


@versioned(1)
def encode_context_image(
    context_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ContextLatents:
    """Encode an image that the denoiser reads beside the generated one, cropped to its
    aspect ratio.
    """
    image = cover(context_image, height, width)
    return {"context_latents": encode_with_vae(image, vae, device, dtype)}


@versioned(1)
def encode_inpaint_image(
    blockwise_controlnet_image: Image.Image,
    blockwise_controlnet_inpaint_mask: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> ControlLatents:
    """Encode an image whose masked part is black, and the mask: white is inpainted.

    The mask's channel is 1 where the image is kept, and has the upper left pixel of
    every 8x8 (DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Inpaint).
    """
    image = cover(blockwise_controlnet_image, height, width)
    mask = cover(blockwise_controlnet_inpaint_mask, height, width, "L")
    masked = mask.point(lambda value: 255 * (value > 127))
    black = Image.new("RGB", image.size)
    latents = encode_with_vae(Image.composite(black, image, masked), vae, device, dtype)
    values = torch.from_numpy(np.array(mask)[::DOWNSCALE, ::DOWNSCALE])
    kept = (1 - values.to(latents) / 255).expand_as(latents[:, :1])
    return {"control_latents": torch.cat([latents, kept], dim=1)}


def predict_controlled(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    control_latents: Tensor,
    *,
    dit: Any,
    blockwise_controlnet: Any,
) -> Tensor:
    """Predict as `predict` does; the ControlNet adds to the image's tokens after each
    block.

    Raises InputError for a ControlNet of other inputs: inpainting ones take a mask.
    """
    tokens = pack(control_latents)
    channels = blockwise_controlnet.config.in_channels
    if tokens.shape[-1] != channels:
        what = f"has {channels} input channels; this variant gives {tokens.shape[-1]}"
        raise InputError("blockwise_controlnet", what)
    control = blockwise_controlnet(tokens)
    blocks = blockwise_controlnet.controlnet_blocks

    def add_control(name: str, block: Any, *given: Any, **named: Any) -> Any:
        text, image = block(*given, **named)
        index = int(name.rpartition(".")[2])
        return text, image + blocks[index](image, control)

    with around_blocks(dit, add_control):
        return predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)


def predict_in_context(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    context_latents: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does; the tokens of the context image follow the noisy ones
    (DiffSynth-Studio/Qwen-Image-In-Context-Control-Union).
    """
    images = [context_latents]
    return predict_edit(
        noisy_latents, timestep, prompt_emb, prompt_mask, images, dit=dit
    )
