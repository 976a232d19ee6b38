"""Fun-Control: a video of depths, poses or edges as a condition, and a reference image."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import Frames, versioned
from PIL import Image
from torch import Tensor

from dstrain_wan import model_fn, units

IMAGE_TOKENS = 257
"""Tokens of an image that the image encoder sees."""


class Control(TypedDict):
    """A conditioning video in the VAE's latent space."""

    control_latents: Tensor
    """(1, 16, latent frames, latent height, latent width), fp32."""


class Reference(TypedDict):
    """An image of what the video shows, in the VAE's latent space."""

    reference_latents: Tensor
    """(1, 16, 1, latent height, latent width), fp32."""


@versioned(1)
def encode_control(
    control_video: Frames, num_frames: int, height: int, width: int, *, vae: Any
) -> Control:
    """Encode a conditioning video, which has at least num_frames frames."""
    frames = units.fitted("control_video", control_video, num_frames, height, width)
    return {"control_latents": units.encode_frames(frames, vae)}


@versioned(1)
def encode_reference(
    reference_image: Image.Image, height: int, width: int, *, vae: Any
) -> Reference:
    """Encode an image, resized to exactly the video's size."""
    made = units.encode_first_frame(reference_image, height, width, vae=vae)
    return {"reference_latents": made["first_latents"]}


@versioned(1)
def encode_squeezed_clip(
    input_image: Image.Image, height: int, width: int, *, image_encoder: Any
) -> units.Clip:
    """Encode an image at the video's size, as the publisher of the Fun models does, in
    training, too (CLIPModel in videox_fun/models/wan_image_encoder.py of
    aigc-apps/VideoX-Fun).
    """
    image = units.resized(input_image, width, height)
    return {"clip_feature": units.seen(image, image_encoder)}


@versioned(1)
def encode_clip_of_reference(
    reference_image: Image.Image, height: int, width: int, *, image_encoder: Any
) -> units.Clip:
    """Encode the reference image as `encode_squeezed_clip` encodes the first frame."""
    return encode_squeezed_clip(
        reference_image, height, width, image_encoder=image_encoder
    )


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    control_latents: Tensor,
    y: Tensor | None = None,
    clip_feature: Tensor | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `model_fn.predict` does, with channels of the control and of what is known;
    what is not given is zeros.

    Args:
        noisy_latents: (batch, channels, frames, h, w).
        timestep: fp32, 0 to 1000, (batch,).
        prompt_emb: (batch, tokens, channels).
        control_latents: (batch, channels, frames, h, w).
        y: (batch, 20, frames, h, w): which frames are known, and their latents. Some
            denoisers have channels for the latents alone.
        clip_feature: (batch, 257, channels).
        dit: The denoiser.
    """
    latents = _with_control(noisy_latents, control_latents, y, dit)
    if clip_feature is None:
        shape = len(prompt_emb), IMAGE_TOKENS, dit.config.image_dim
        clip_feature = prompt_emb.new_zeros(shape)
    return model_fn.denoise(latents, timestep, prompt_emb, clip_feature, dit)


def predict_with_reference(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    control_latents: Tensor,
    reference_latents: Tensor,
    y: Tensor | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, with reference_latents, (batch, channels, 1, h, w), and no
    image encoder.
    """
    latents = _with_control(noisy_latents, control_latents, y, dit)
    return model_fn.denoise(
        latents, timestep, prompt_emb, None, dit, reference_latents=reference_latents
    )


def predict_with_reference_and_clip(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    control_latents: Tensor,
    reference_latents: Tensor,
    clip_feature: Tensor,
    y: Tensor | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict_with_reference` does, with clip_feature, (batch, 257, channels):
    the reference image as the image encoder sees it.
    """
    latents = _with_control(noisy_latents, control_latents, y, dit)
    return model_fn.denoise(
        latents,
        timestep,
        prompt_emb,
        clip_feature,
        dit,
        reference_latents=reference_latents,
    )


def _with_control(
    noisy_latents: Tensor, control_latents: Tensor, y: Tensor | None, dit: Any
) -> Tensor:
    """Return all channels of the denoiser's input."""
    batch, channels, *size = noisy_latents.shape
    remaining = dit.config.in_channels - 2 * channels
    if y is None:
        y = noisy_latents.new_zeros(batch, remaining, *size)
    return torch.cat([noisy_latents, control_latents, y[:, -remaining:]], dim=1)
