"""Networks: a denoiser, a text encoder that reads bytes, and a VAE, all tiny."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BYTES = 256


class Block(nn.Module):
    """A block of the denoiser: image tokens attend to the text and to each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """Return new tokens.

        Args:
            tokens: (batch, positions, width).
            text: (batch, bytes, width).
            mask: (batch, bytes), bool; True where there is text.
        """
        hidden = self.norm(tokens)
        seen = torch.cat([text, hidden], dim=1)
        visible = nn.functional.pad(mask, (0, hidden.shape[1]), value=True)
        found = nn.functional.scaled_dot_product_attention(
            self.to_q(hidden),
            self.to_k(seen),
            self.to_v(seen),
            attn_mask=visible[:, None],
        )
        attended: Tensor = tokens + self.to_out(found)
        return attended


class Denoiser(nn.Module):
    """Predict noise - x_0 at every position of the latents."""

    def __init__(
        self, channels: int = 4, width: int = 16, depth: int = 2, text_width: int = 16
    ) -> None:
        super().__init__()
        self.proj_in = nn.Linear(channels, width)
        self.time = nn.Linear(2, width)
        self.text = nn.Linear(text_width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, channels)
        self.checkpoint: Callable[..., Any] | None = None

    def enable_gradient_checkpointing(self, checkpoint: Callable[..., Any]) -> None:
        """Call every block through `checkpoint`, as the networks of diffusers do."""
        self.checkpoint = checkpoint

    def forward(
        self, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the prediction, (batch, channels, height, width).

        Args:
            latents: (batch, channels, height, width).
            timestep: (batch,), 0 to 1.
            text: (batch, bytes, text_width).
            mask: (batch, bytes), bool; True where there is text.
        """
        angle = timestep[:, None] * 3
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        tokens = self.proj_in(latents.flatten(2).transpose(1, 2)) + time[:, None]
        words = self.text(text)
        for block in self.blocks:
            call = partial(self.checkpoint, block) if self.checkpoint else block
            tokens = call(tokens, words, mask)
        prediction: Tensor = (
            self.proj_out(tokens).transpose(1, 2).reshape(latents.shape)
        )
        return prediction


class TextEncoder(nn.Module):
    """Encode each byte of a text as a vector."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.layer = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (batch, bytes, width) for ids of (batch, bytes), int64."""
        hidden: Tensor = torch.tanh(self.layer(self.dropout(self.embed(ids))))
        return hidden


class Vae(nn.Module):
    """Encode each patch of pixels as a few numbers, and decode it."""

    def __init__(self, channels: int = 4, side: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, channels, side, side)
        self.decoder = nn.ConvTranspose2d(channels, 3, side, side)
