"""Wan's units: prompt, video, first and last frame to conditions, and latents to a video."""

import html
import re
from typing import Any, TypedDict

import torch
from dstrain.plugin import Frames, InputError, versioned
from dstrain.plugin.functional import (
    as_uint8,
    check_length,
    convert_image,
    images_to_tensor,
    latents_mean_std,
    to_minus_one_one,
)
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

MAX_TOKENS = 512
"""Tokens of a prompt, its end mark included (WanPipeline of diffusers)."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Per colour, of pixels in 0 to 1: the published preprocessor_config.json, which is
CLIPImageProcessor's default.
"""


class Prompt(TypedDict):
    """An encoded prompt."""

    prompt_emb: Tensor
    """(1, tokens, channels) of its true length, the text encoder's dtype."""


class Latents(TypedDict):
    """A video in the VAE's latent space, normalized per channel."""

    input_latents: Tensor
    """(1, channels, latent frames, latent height, latent width), fp32."""


class Clip(TypedDict):
    """An image as the image encoder sees it."""

    clip_feature: Tensor
    """(1, 257, 1280), its last hidden states but one, the image encoder's dtype; those of
    two images one after the other.
    """


class Known(TypedDict):
    """Which frames are known, and what they look like."""

    y: Tensor
    """(1, 4 + 16, latent frames, latent height, latent width), fp32: mask, latents."""


class FirstLatents(TypedDict):
    """The first frame in the VAE's latent space, normalized per channel."""

    first_latents: Tensor
    """(1, channels, 1, latent height, latent width), fp32."""


class Video(TypedDict):
    """A generated video."""

    video: Frames


@versioned(1)
def encode_prompt(
    prompt: str, *, text_encoder: Any, tokenizer: Any, device: torch.device
) -> Prompt:
    """Encode a prompt as umT5's last hidden states, one per token.

    The text encoder sees 512 tokens, those after the text masked, as in the published
    code: only then the numbers are equal.
    """
    text = clean(prompt)
    check_length(tokenizer, text, MAX_TOKENS, "umT5")
    tokens = tokenizer(
        [text],
        max_length=MAX_TOKENS,
        truncation=True,
        padding="max_length",
        return_tensors="pt",
    ).to(device)
    states = text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return {"prompt_emb": states[:, : int(tokens.attention_mask.sum())]}


def clean(prompt: str) -> str:
    """Undo HTML's escapes, twice, and make white space single blanks (`prompt_clean` of
    diffusers, without ftfy).
    """
    text = html.unescape(html.unescape(prompt))
    return re.sub(r"\s+", " ", text).strip()


@versioned(1)
def encode_video(input_video: Frames, *, vae: Any) -> Latents:
    """Encode a video of 4n + 1 frames as the mode of the VAE's distribution."""
    return {"input_latents": encode_frames(to_minus_one_one(input_video.pixels), vae)}


@versioned(1)
def encode_clip(input_image: Image.Image, *, image_encoder: Any) -> Clip:
    """Encode an RGB image as the image encoder's last hidden states but one."""
    return {"clip_feature": seen(input_image, image_encoder)}


@versioned(1)
def encode_clip_of_ends(
    input_image: Image.Image, end_image: Image.Image, *, image_encoder: Any
) -> Clip:
    """Encode the first and the last frame as `encode_clip` does."""
    ends = [seen(image, image_encoder) for image in (input_image, end_image)]
    return {"clip_feature": torch.cat(ends, dim=1)}


def seen(image: Image.Image, image_encoder: Any) -> Tensor:
    """Return the image encoder's last hidden states but one, (1, 257, 1280), of all of an
    RGB image, squeezed to its input, 224 x 224: the aspect ratio is not kept.

    Source: CLIPModel.visual in wan/modules/clip.py of Wan-Video/Wan2.1.
    """
    side = image_encoder.config.image_size
    pixels = images_to_tensor([image])
    squeezed = interpolate(pixels, (side, side), mode="bicubic", align_corners=False)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CLIP_MEAN, CLIP_STD))
    batch = ((squeezed / 2 + 0.5 - mean) / std).to(
        image_encoder.device, image_encoder.dtype
    )
    states: Tensor = image_encoder(batch, output_hidden_states=True).hidden_states[-2]
    return states


@versioned(1)
def encode_first(
    input_image: Image.Image,
    num_frames: int,
    height: int,
    width: int,
    end_image: Image.Image | None = None,
    *,
    vae: Any,
) -> Known:
    """Encode the first frame and, if given, the last one, with grey frames for the others,
    and say which are known.

    The mask's four channels are the four frames of a latent frame; the first latent
    frame is one frame alone. Source: WanImageToVideoPipeline.prepare_latents of
    diffusers.

    Raises InputError where the last frame would be the first one.
    """
    frames = images_to_tensor([resized(input_image, width, height)])
    grey = frames.new_zeros(num_frames - 1, 3, height, width)
    if end_image is not None:
        if num_frames == 1:
            raise InputError("num_frames", "is 1, and end_image is another frame")
        grey[-1:] = images_to_tensor([resized(end_image, width, height)])
    latents = encode_frames(torch.cat([frames, grey]), vae)
    mask = latents.new_zeros(1, vae.config.scale_factor_temporal, *latents.shape[2:])
    mask[:, :, 0] = 1
    if end_image is not None:
        mask[:, -1, -1] = 1
    return {"y": torch.cat([mask, latents], dim=1)}


@versioned(1)
def encode_first_frame(
    input_image: Image.Image, height: int, width: int, *, vae: Any
) -> FirstLatents:
    """Encode the first frame as the mode of the VAE's distribution."""
    first = images_to_tensor([resized(input_image, width, height)])
    return {"first_latents": encode_frames(first, vae)}


@versioned(1)
def decode(latents: Tensor, fps: float, *, vae: Any) -> Video:
    """Decode latents, (1, channels, latent frames, latent height, latent width)."""
    latents = latents.to(vae.device, torch.float32)
    mean, std = latents_mean_std(vae.config, latents)
    # Not latents * std: diffusers divides, and then the pixels are equal, too.
    scaled = (latents / (1 / std) + mean).to(vae.dtype)
    pixels = vae.decode(scaled, return_dict=False)[0][0]
    return {"video": Frames(as_uint8(pixels.transpose(0, 1)), fps)}


def fitted(name: str, video: Frames, frames: int, height: int, width: int) -> Tensor:
    """Return the first frames of a conditioning video in the size of the one that is
    generated, (frames, 3, height, width) in -1 to 1; raises InputError for fewer frames.
    """
    pixels = video.pixels[:frames]
    if len(pixels) < frames:
        what = f"frames: {len(pixels)}, but the video to generate has {frames}"
        raise InputError(name, what)
    if pixels.shape[1:3] == (height, width):
        return to_minus_one_one(pixels)
    images = [Image.fromarray(frame.cpu().numpy()) for frame in pixels]
    return images_to_tensor([resized(image, width, height) for image in images])


def encode_frames(frames: Tensor, vae: Any) -> Tensor:
    """Return normalized latents, fp32, of frames, (frames, 3, height, width) in -1 to 1."""
    pixels = frames.transpose(0, 1)[None].to(vae.device, vae.dtype)
    mode = vae.encode(pixels).latent_dist.mode().float()
    mean, std = latents_mean_std(vae.config, mode)
    return (mode - mean) * (1 / std)


def resized(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize an image without keeping its aspect ratio, as diffusers does."""
    size, kernel = (width, height), Image.Resampling.LANCZOS
    return convert_image(image, "RGB").resize(size, kernel)
