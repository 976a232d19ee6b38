"""Qwen-Image's denoiser: one call of it, its guidance, and the shape of its latents.

Latents keep the VAE's layout, (batch, 16, 1, height / 8, width / 8); the transformer
reads tokens, which are patches of 2x2: (batch, height / 16 * width / 16, 64). Images to
edit are more tokens of the same kind.
"""

from typing import Any

import torch
from dstrain.plugin import functional, versioned
from dstrain.plugin.functional import override_positional_args
from PIL import Image
from torch import Tensor

CHANNELS = 16
DOWNSCALE = 8
"""Pixels per latent, along each side."""
PATCH = 2
"""Latents per token, along each side."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, shaped as noisy_latents.

    Args:
        noisy_latents: (batch, 16, 1, h, w).
        timestep: (batch,) fp32, 0 to 1000.
        prompt_emb: (batch, tokens, channels).
        prompt_mask: (batch, tokens) bool; all true counts as no mask, which lets
            attention use its faster kernels.
        dit: The denoiser.
    """
    return predict_edit(noisy_latents, timestep, prompt_emb, prompt_mask, [], dit=dit)


def predict_edit(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    edit_latents: list[Tensor],
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does; the tokens of images to edit, (batch, 16, 1, h, w)
    each, follow the noisy ones.

    Each image has its own grid of positions. A denoiser with `zero_cond_t` sees these
    tokens at timestep 0.
    """
    images = [noisy_latents, *edit_latents]
    return predict_images(images, 1, timestep, prompt_emb, prompt_mask, dit=dit)


def predict_images(
    images: list[Tensor],
    count: int,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    *,
    dit: Any,
    **named: Any,
) -> Tensor:
    """Predict the first `count` of these images, (batch, 16, 1, h, w) each, beside the
    others; return (batch, 16, count, h, w).

    named: Further arguments of the denoiser.
    """
    packed = [pack(image) for image in images]
    grids = []
    for image in images:
        height, width = image.shape[-2:]
        grids.append((1, height // PATCH, width // PATCH))
    time = timestep / 1000
    exact = torch.cat([time, torch.zeros_like(time)]) if dit.zero_cond_t else time
    with override_positional_args(dit.time_text_embed, exact):
        tokens = dit(
            hidden_states=torch.cat(packed, dim=1),
            timestep=time,
            encoder_hidden_states=prompt_emb,
            encoder_hidden_states_mask=None if prompt_mask.all() else prompt_mask,
            img_shapes=[grids] * len(images[0]),
            return_dict=False,
            **named,
        )[0]
    length = packed[0].shape[1]
    height, width = images[0].shape[-2:]
    predictions = [
        unpack(tokens[:, start : start + length], height, width)
        for start in range(0, count * length, length)
    ]
    return torch.cat(predictions, dim=2)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance, then rescale each token to the norm it has in
    `positive`, as QwenImagePipeline of diffusers does.

    All are (batch, 16, 1, h, w).
    """
    wanted = pack(positive)
    guided = functional.apply_guidance(wanted, pack(negative), scale)
    ratio = wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    return unpack(guided * ratio, *positive.shape[-2:])


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, 1, height / 8, width / 8); raises InputError for a side that is
    not a multiple of 16.
    """
    functional.check_sides(height, width, DOWNSCALE * PATCH)
    return (1, CHANNELS, 1, height // DOWNSCALE, width // DOWNSCALE)


@versioned(1)
def latent_shape_edit(
    resized_edit_images: list[Image.Image],
    height: int | None = None,
    width: int | None = None,
) -> tuple[int, ...]:
    """Return the shape for a side that is given, else for that of the last image to
    edit, as diffusers does.
    """
    last = resized_edit_images[-1]
    return latent_shape(height or last.height, width or last.width)


def pack(latents: Tensor) -> Tensor:
    """Return latents, (batch, 16, 1, h, w), as tokens, (batch, h / 2 * w / 2, 64)."""
    return functional.pack(latents[:, :, 0], PATCH)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return tokens of `pack` as latents, (batch, 16, 1, height, width)."""
    return functional.unpack(tokens, height, width, PATCH)[:, :, None]
