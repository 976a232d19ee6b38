"""Qwen-Image's denoiser: one call of it, its guidance, and the shape of its latents.

Latents lie in the VAE's layout, (batch, 16, 1, height / 8, width / 8); the transformer
reads tokens, which are patches of 2x2: (batch, height / 16 * width / 16, 64). Pictures
to be edited are more tokens of the same kind.
"""

from typing import Any

import torch
from dstrain.plugin import functional as latents
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
    """Predict noise - x_0, shaped as noisy.

    noisy: (batch, 16, 1, h, w). timestep: (batch,) fp32, 0 to 1000. prompt_emb: (batch,
    tokens, channels). prompt_mask: (batch, tokens) bool; all true counts as no mask,
    which lets attention use its faster kernels.
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
    """Predict as `predict` does; the tokens of pictures to be edited, (batch, 16, 1, h,
    w) each, follow the noisy ones.

    Each picture has its own grid of positions. A denoiser with `zero_cond_t` sees these
    tokens at timestep 0.
    """
    images = [noisy_latents, *edit_latents]
    grids = [
        (1, image.shape[-2] // PATCH, image.shape[-1] // PATCH) for image in images
    ]
    time = timestep / 1000
    with override_positional_args(
        dit.time_text_embed,
        torch.cat([time, torch.zeros_like(time)]) if dit.zero_cond_t else time,
    ):
        tokens = dit(
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            timestep=time,
            encoder_hidden_states=prompt_emb,
            encoder_hidden_states_mask=None if prompt_mask.all() else prompt_mask,
            img_shapes=[grids] * len(noisy_latents),
            return_dict=False,
        )[0]
    _, rows, columns = grids[0]
    return unpack(tokens[:, : rows * columns], rows, columns)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, each token then rescaled to the norm it has in
    `positive`.

    All are (batch, 16, 1, h, w). Source: QwenImagePipeline of diffusers.
    """
    rows, columns = positive.shape[-2] // PATCH, positive.shape[-1] // PATCH
    wanted = pack(positive)
    guided = latents.apply_guidance(wanted, pack(negative), scale)
    return unpack(
        guided
        * (wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)),
        rows,
        columns,
    )


def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, 1, height / 8, width / 8); raises InputError for a side that is no
    multiple of 16.
    """
    latents.check_sides(height, width, DOWNSCALE * PATCH)
    return (1, CHANNELS, 1, height // DOWNSCALE, width // DOWNSCALE)


def latent_shape_edit(
    edit_pictures: list[Image.Image],
    height: int | None = None,
    width: int | None = None,
) -> tuple[int, ...]:
    """Return the shape for a side that is given, else for that of the last picture to
    be edited, as diffusers does.
    """
    last = edit_pictures[-1]
    return latent_shape(height or last.height, width or last.width)


def pack(grid: Tensor) -> Tensor:
    """Latents, (batch, channels, 1, 2 rows, 2 columns) -> tokens, (batch, rows *
    columns, 4 channels).
    """
    return latents.pack(grid[:, :, 0], PATCH)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens, (batch, rows * columns, 4 channels) -> latents, (batch, channels, 1, 2
    rows, 2 columns).
    """
    return latents.unpack(tokens, rows * PATCH, columns * PATCH, PATCH)[:, :, None]
