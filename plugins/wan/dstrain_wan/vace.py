"""VACE: a video to be changed, its mask and a reference image as conditions, and what its
blocks add to those of the denoiser.
"""

from itertools import pairwise
from typing import Any, TypedDict

import torch
from dstrain.plugin import Frames, versioned
from dstrain.plugin.functional import around_blocks, images_to_tensor
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pixel_unshuffle

from dstrain_wan import model_fn, units


class Conditions(TypedDict):
    """What is kept of a video, what is changed, and where."""

    vace_context: Tensor
    """(1, 16 + 16 + 64, latent frames, latent height, latent width), fp32: latents of what
    stays, of what changes, and the mask, whose 8x8 pixels per latent are channels. A
    reference image is a frame before the others.
    """


@versioned(1)
def encode_video_after_reference(
    input_video: Frames, vace_reference_image: Image.Image | None = None, *, vae: Any
) -> units.Latents:
    """Encode a video as `encode_video` does, after the reference image if there is one."""
    latents = units.encode_video(input_video, vae=vae)["input_latents"]
    if vace_reference_image is not None:
        height, width = input_video.pixels.shape[1:3]
        reference = _encode_reference(vace_reference_image, height, width, vae)
        latents = torch.cat([reference, latents], dim=2)
    return {"input_latents": latents}


@versioned(1)
def encode_conditions(
    num_frames: int,
    height: int,
    width: int,
    vace_video: Frames | None = None,
    vace_video_mask: Frames | None = None,
    vace_reference_image: Image.Image | None = None,
    *,
    vae: Any,
) -> Conditions:
    """Encode what is generated from: a grey video where there is none, all of which
    changes where there is no mask.

    Source: WanVACEPipeline of diffusers, `prepare_video_latents` and `prepare_masks`.

    Args:
        num_frames: 4n + 1.
        height: That of the video to be generated.
        width: The same.
        vace_video: At least as many frames.
        vace_video_mask: The same, white where the video changes and black where not.
        vace_reference_image: What the video shows, of any size.
        vae: The VAE.
    """
    size = num_frames, height, width
    video = torch.zeros(num_frames, 3, height, width)
    if vace_video is not None:
        video = units.fitted("vace_video", vace_video, *size)
    mask = torch.ones_like(video)
    if vace_video_mask is not None:
        shown = units.fitted("vace_video_mask", vace_video_mask, *size)
        mask = (shown + 1) / 2
    changes = (mask > 0.5).float()
    kept = units.encode_frames(video * (1 - changes), vae)
    changed = units.encode_frames(video * changes, vae)
    latents = torch.cat([kept, changed], dim=1)
    spatial = vae.config.scale_factor_spatial
    # (frames, 8 * 8, h, w): pixel_unshuffle puts the rows and columns of a latent there.
    channels = pixel_unshuffle(mask[:, :1].to(latents.device), spatial)
    masks = interpolate(
        channels.transpose(0, 1)[None], latents.shape[2:], mode="nearest-exact"
    )
    if vace_reference_image is not None:
        reference = _encode_reference(vace_reference_image, height, width, vae)
        first = torch.cat([reference, torch.zeros_like(reference)], dim=1)
        latents = torch.cat([first, latents], dim=2)
        masks = torch.cat([torch.zeros_like(masks[:, :, :1]), masks], dim=2)
    return {"vace_context": torch.cat([latents, masks], dim=1)}


def _encode_reference(image: Image.Image, height: int, width: int, vae: Any) -> Tensor:
    """Encode an image, scaled into the middle of a white one, as one latent frame.

    It is scaled without antialiasing, after its sides are made multiples of 8
    (`preprocess_conditions` of WanVACEPipeline).
    """
    step = vae.config.scale_factor_spatial
    sides = (side - side % step for side in image.size)
    pixels = images_to_tensor([units.resized(image, *sides)])
    scale = min(height / pixels.shape[2], width / pixels.shape[3])
    rows, columns = (int(side * scale) for side in pixels.shape[2:])
    scaled = interpolate(pixels, (rows, columns), mode="bilinear", align_corners=False)
    top = (height - rows) // 2
    left = (width - columns) // 2
    canvas = torch.ones(1, 3, height, width)
    canvas[:, :, top : top + rows, left : left + columns] = scaled
    return units.encode_frames(canvas, vae)


@versioned(1)
def latent_shape(
    height: int,
    width: int,
    num_frames: int,
    vace_reference_image: Image.Image | None = None,
    *,
    vae_config: Any,
) -> tuple[int, ...]:
    """Return the shape of the video's latents, one frame longer with a reference image;
    raises what `model_fn.latent_shape` raises.
    """
    batch, channels, frames, *sides = model_fn.latent_shape(
        height, width, num_frames, vae_config=vae_config
    )
    return (batch, channels, frames + (vace_reference_image is not None), *sides)


@versioned(1)
def decode(latents: Tensor, num_frames: int, fps: float, *, vae: Any) -> units.Video:
    """Decode latents without the frame of a reference image."""
    frames = (num_frames - 1) // vae.config.scale_factor_temporal + 1
    return units.decode(latents[:, :, -frames:], fps, vae=vae)


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    vace_context: Tensor,
    *,
    dit: Any,
    vace: Any,
) -> Tensor:
    """Predict as `model_fn.predict` does, with what VACE adds after the blocks.

    Args:
        noisy_latents: (batch, channels, frames, h, w).
        timestep: fp32, 0 to 1000, (batch,).
        prompt_emb: (batch, tokens, channels).
        vace_context: (batch, 96, frames, h, w).
        dit: The denoiser.
        vace: The blocks beside it.
    """
    with around_blocks(dit, _Added(dit, vace, vace(vace_context))):
        return model_fn.predict(noisy_latents, timestep, prompt_emb, dit=dit)


class _Added:
    """Calls the denoiser's blocks, with one of VACE's after each that is followed by one.

    They are computed there and not all before the first, so that each is recomputed with
    its block of the denoiser, and only then.
    """

    def __init__(self, dit: Any, vace: Any, embedded: Tensor) -> None:
        layers = vace.config.vace_layers
        self.blocks = dict(zip(layers, vace.vace_blocks, strict=True))
        self.following = dict(pairwise(layers))
        self.states = {layers[0]: embedded}
        self.checkpoint = None
        is_recomputed = getattr(dit, "gradient_checkpointing", False)
        if vace.gradient_checkpointing and not is_recomputed:
            self.checkpoint = vace._gradient_checkpointing_func

    def __call__(
        self,
        name: str,
        block: Any,
        tokens: Tensor,
        text: Tensor,
        modulation: Tensor,
        rotary: Any,
    ) -> Tensor:
        made: Tensor = block(tokens, text, modulation, rotary)
        number = int(name.rpartition(".")[2])
        if number not in self.blocks:
            return made
        arguments = (tokens, text, self.states[number], modulation, rotary)
        beside = self.blocks[number]
        if self.checkpoint is not None and torch.is_grad_enabled():
            added, state = self.checkpoint(beside, *arguments)
        else:
            added, state = beside(*arguments)
        if number in self.following:
            # The first time counts: what is recomputed has a graph of its own.
            self.states.setdefault(self.following[number], state)
        return made + added
