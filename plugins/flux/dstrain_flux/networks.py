"""Networks that diffusers lacks, or has in part."""

import warnings
from collections.abc import Sequence

import diffusers
import torch
from diffusers.configuration_utils import register_to_config


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
                that is not told.
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
        self.controlnet_x_embedder = torch.nn.Linear(
            in_channels + extra_condition_channels, self.inner_dim
        )
        for layer in (*self.controlnet_blocks, *self.controlnet_single_blocks):
            layer.reset_parameters()
