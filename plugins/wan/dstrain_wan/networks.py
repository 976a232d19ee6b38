"""Networks of Wan that diffusers does not have."""

from collections.abc import Sequence

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import Tensor, nn


class Vace(ModelMixin, ConfigMixin):  # type: ignore[misc]  # of diffusers, untyped
    """Blocks beside those of a denoiser, which turn a conditioning video into what is
    added after some of them (Wan-AI/Wan2.1-VACE-14B; in diffusers it is a part of
    WanVACETransformer3DModel).
    """

    _supports_gradient_checkpointing = True
    _repeated_blocks = ("WanVACETransformerBlock",)

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        ffn_dim: int = 13824,
        vace_layers: Sequence[int] = (0, 5, 10, 15, 20, 25, 30, 35),
        vace_in_channels: int = 96,
        patch_size: Sequence[int] = (1, 2, 2),
        cross_attn_norm: bool = True,
        qk_norm: str = "rms_norm_across_heads",
        eps: float = 1e-6,
    ) -> None:
        """Build it for a denoiser of the same heads, patches and norms.

        vace_layers: The denoiser's blocks after which something is added, from 0 on.
        vace_in_channels: Channels of the conditions.
        """
        super().__init__()
        width = num_attention_heads * attention_head_dim
        patch = tuple(patch_size)
        self.vace_patch_embedding = nn.Conv3d(vace_in_channels, width, patch, patch)
        self.vace_blocks = nn.ModuleList(
            WanVACETransformerBlock(
                width,
                ffn_dim,
                num_attention_heads,
                qk_norm,
                cross_attn_norm,
                eps,
                apply_input_projection=number == 0,
                apply_output_projection=True,
            )
            for number in range(len(vace_layers))
        )
        self.gradient_checkpointing = False

    def forward(self, vace_context: Tensor) -> Tensor:
        """Embed the conditions, (batch, vace_in_channels, frames, h, w), as its first block
        takes them, (batch, tokens, width).
        """
        embedded: Tensor = self.vace_patch_embedding(vace_context)
        return embedded.flatten(2).transpose(1, 2)
