"""Qwen-Image's denoiser: one call of it, its guidance, and the shape of its latents.

Latents lie in the VAE's layout, (batch, 16, 1, height / 8, width / 8); the transformer reads tokens, which are
patches of 2x2: (batch, height / 16 * width / 16, 64).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dstrain.errors import UsageError
from dstrain.schedule import TRAIN_TIMESTEPS
from torch import Tensor, nn

CHANNELS = 16
DOWNSCALE = 8
"""Pixels per latent, along each side."""
PATCH = 2
"""Latents per token, along each side."""


def predict(noisy: Tensor, timestep: Tensor, prompt_emb: Tensor, prompt_mask: Tensor, *, dit: Any) -> Tensor:
    """Predict noise - x_0, shaped as noisy.

    noisy: (batch, 16, 1, h, w). timestep: (batch,) fp32, 0 to 1000. prompt_emb: (batch, tokens, channels).
    prompt_mask: (batch, tokens) bool; all true counts as no mask, which lets attention use its faster kernels.
    """
    rows, columns = noisy.shape[-2] // PATCH, noisy.shape[-1] // PATCH
    time = timestep / TRAIN_TIMESTEPS
    with exact_timestep(dit.time_text_embed, time):
        tokens = dit(
            hidden_states=pack(noisy),
            timestep=time,
            encoder_hidden_states=prompt_emb,
            encoder_hidden_states_mask=None if prompt_mask.all() else prompt_mask,
            img_shapes=[[(1, rows, columns)]] * len(noisy),
            return_dict=False,
        )[0]
    return unpack(tokens, rows, columns)


@contextmanager
def exact_timestep(embed: nn.Module, timestep: Tensor) -> Iterator[None]:
    """While this lasts, the timestep's embedding receives `timestep`, (batch,) fp32, as it is.

    The transformer rounds its timestep to the dtype of the hidden states first: in bf16, 500 and 501 are then one.
    """
    handle = embed.register_forward_pre_hook(lambda _, arguments: (timestep, *arguments[1:]))
    try:
        yield
    finally:
        handle.remove()


def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance, each token then rescaled to the norm it has in `positive`.

    All are (batch, 16, 1, h, w). Source: QwenImagePipeline of diffusers.
    """
    rows, columns = positive.shape[-2] // PATCH, positive.shape[-1] // PATCH
    wanted, other = pack(positive), pack(negative)
    guided = other + scale * (wanted - other)
    return unpack(guided * (wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)), rows, columns)


def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, 1, height / 8, width / 8); raises UsageError for a side that is no multiple of 16."""
    multiple = DOWNSCALE * PATCH
    for name, side in (("height", height), ("width", width)):
        if side <= 0 or side % multiple:
            raise UsageError(name, f"want a multiple of {multiple}, got {side}")
    return (1, CHANNELS, 1, height // DOWNSCALE, width // DOWNSCALE)


def pack(latents: Tensor) -> Tensor:
    """Latents, (batch, channels, 1, 2 rows, 2 columns) -> tokens, (batch, rows * columns, 4 channels)."""
    batch, channels, _, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Tokens, (batch, rows * columns, 4 channels) -> latents, (batch, channels, 1, 2 rows, 2 columns)."""
    batch, _, width = tokens.shape
    patches = tokens.reshape(batch, rows, columns, width // PATCH**2, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, -1, 1, rows * PATCH, columns * PATCH)
