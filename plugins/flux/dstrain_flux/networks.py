"""Networks that diffusers lacks, or has in part."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class FluxControlNetModel(diffusers.FluxControlNetModel):
    """The ControlNet of diffusers, whose image may have further channels.

    Its layers whose published initialization is zero are random: weights come from files,
    and nothing behind a zero would be reached in a toy.
    """

    _repeated_blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

    @register_to_config
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: Sequence[int] = (16, 56, 56),
        num_mode: int | None = None,
        extra_condition_channels: int = 0,
    ) -> None:
        """Build the network.

        Args:
            num_mode: Kinds of control that it knows (a union of ControlNets); None for one
                without modes.
            extra_condition_channels: Channels of the image's tokens beyond in_channels.
        """
        with warnings.catch_warnings():
            # It imports its positions from a place that diffusers deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(
                patch_size=patch_size,
                in_channels=in_channels,
                num_layers=num_layers,
                num_single_layers=num_single_layers,
                attention_head_dim=attention_head_dim,
                num_attention_heads=num_attention_heads,
                joint_attention_dim=joint_attention_dim,
                pooled_projection_dim=pooled_projection_dim,
                guidance_embeds=guidance_embeds,
                axes_dims_rope=axes_dims_rope,
                num_mode=num_mode,
            )
        self.controlnet_x_embedder = nn.Linear(
            in_channels + extra_condition_channels, self.inner_dim
        )
        for layer in (*self.controlnet_blocks, *self.controlnet_single_blocks):
            layer.reset_parameters()


class FluxIPAdapter(nn.Module):
    """The IP-Adapter of InstantX/FLUX.1-dev-IP-Adapter: images as tokens, to which each
    block of the denoiser attends with weights of its own.
    """

    def __init__(
        self,
        hidden_size: int = 3072,
        cross_attention_dim: int = 4096,
        image_dim: int = 1152,
        num_tokens: int = 128,
        num_blocks: int = 57,
    ) -> None:
        """Build the network.

        Args:
            hidden_size: Channels of the denoiser's tokens.
            cross_attention_dim: Channels of an image's tokens.
            image_dim: Channels of an image's embedding.
            num_tokens: Tokens of an image.
            num_blocks: Blocks of the denoiser, the joint ones first.
        """
        super().__init__()
        self.image_proj = ImageProjection(image_dim, cross_attention_dim, num_tokens)
        self.ip_adapter = nn.ModuleList(
            ImageAttention(cross_attention_dim, hidden_size) for _ in range(num_blocks)
        )

    def enable_gradient_checkpointing(self, checkpoint: Callable[..., Any]) -> None:
        """Do nothing: what it adds to a block of the denoiser is recomputed with that."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the tokens of images, (batch, images * tokens, channels), as its layers
        take them, for (batch, images, image_dim).
        """
        tokens: Tensor = self.image_proj(embeddings)
        return tokens


class ImageProjection(nn.Module):
    """Maps embeddings of images to tokens."""

    def __init__(self, image_dim: int, channels: int, num_tokens: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.Linear(image_dim, 2 * image_dim),
            nn.GELU(),
            nn.Linear(2 * image_dim, num_tokens * channels),
        )
        self.norm = nn.LayerNorm(channels)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return (batch, images * tokens, channels) for (batch, images, image_dim)."""
        channels = self.norm.normalized_shape[0]
        tokens: Tensor = self.norm(self.proj(embeddings).unflatten(-1, (-1, channels)))
        return tokens.flatten(1, 2)


class ImageAttention(nn.Module):
    """What a block of the denoiser adds to its attention: that of its tokens to images."""

    EPSILON = 1e-5

    def __init__(self, channels: int, hidden_size: int) -> None:
        super().__init__()
        self.to_k_ip = nn.Linear(channels, hidden_size, bias=False)
        self.to_v_ip = nn.Linear(channels, hidden_size, bias=False)

    def forward(self, query: Tensor, image_tokens: Tensor) -> Tensor:
        """Return (batch, tokens, hidden_size).

        Args:
            query: (batch, tokens, heads, dimension), normalized and without positions.
            image_tokens: (batch, image tokens, channels).
        """
        heads = query.shape[2:]
        value = self.to_v_ip(image_tokens).unflatten(-1, heads)
        key = self.to_k_ip(image_tokens).unflatten(-1, heads).float()
        key = nn.functional.rms_norm(key, heads[1:], eps=self.EPSILON)
        parts = (query.to(value.dtype), key.to(value.dtype), value)
        seen = nn.functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in parts)
        )
        return seen.transpose(1, 2).flatten(2)

    @contextmanager
    def beside(
        self, attention: Any, image_tokens: Tensor, scale: float
    ) -> Iterator[None]:
        """Let a block's attention add this one's result within the context, before its
        projection if it has one.

        Args:
            attention: A FluxAttention of diffusers.
            image_tokens: As in `forward`.
            scale: Factor of what is added.
        """
        added: list[Tensor] = []

        def attend(_: Any, __: Any, query: Tensor) -> None:
            added[:] = [scale * self(query, image_tokens)]

        def add(hidden_states: Tensor) -> Tensor:
            return hidden_states + added.pop().to(hidden_states.dtype)

        if attention.pre_only:
            last = attention.register_forward_hook(lambda _, __, found: add(found))
        else:
            last = attention.to_out[0].register_forward_pre_hook(
                lambda _, given: (add(given[0]),)
            )
        first = attention.norm_q.register_forward_hook(attend)
        try:
            yield
        finally:
            first.remove()
            last.remove()
