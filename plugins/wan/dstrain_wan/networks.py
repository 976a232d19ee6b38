"""Networks of Wan that diffusers does not have."""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle

from dstrain_wan import DOWNSCALE


class WanTransformer3DModel(diffusers.WanTransformer3DModel):  # type: ignore[misc]  # untyped
    """diffusers' class, with what the Fun models add to the embedded patches
    (PAI/Wan2.1-Fun-V1.1-14B-Control and -Control-Camera).

    It has the same name, so that configurations and weights are read by both.
    """

    def __init__(
        self,
        ref_channels: int | None = None,
        camera_channels: int | None = None,
        **published: Any,
    ) -> None:
        """Build it; `published` is what the class of diffusers takes.

        ref_channels: Those of a reference image's latents; None for no reference.
        camera_channels: Those of rays per pixel; None for no control of the camera.
        """
        super().__init__(**published)
        self.register_to_config(
            ref_channels=ref_channels, camera_channels=camera_channels
        )
        width = self.config.num_attention_heads * self.config.attention_head_dim
        patch = tuple(self.config.patch_size[1:])
        if ref_channels:
            self.ref_conv = nn.Conv2d(ref_channels, width, patch, patch)
        if camera_channels:
            self.control_adapter = CameraAdapter(camera_channels, width, patch)

    def forward(
        self,
        hidden_states: Tensor,
        *arguments: Any,
        reference_latents: Tensor | None = None,
        rays: Tensor | None = None,
        **named: Any,
    ) -> Any:
        """Return what the class of diffusers returns, of the frames in hidden_states.

        Args:
            hidden_states: (batch, channels, frames, h, w).
            *arguments: Those of the class of diffusers.
            reference_latents: (batch, ref_channels, 1, h, w): patches of a frame before
                the others, which is left out of the result.
            rays: (batch, camera_channels, frames, 8 h, 8 w): added to the patches.
            **named: Those of the class of diffusers.
        """
        if reference_latents is None and rays is None:
            return super().forward(hidden_states, *arguments, **named)
        before = 0 if reference_latents is None else 1

        def embed(module: nn.Module, given: Any, patches: Tensor) -> Tensor:
            if rays is not None:
                patches = patches + self.control_adapter(rays)
            if reference_latents is None:
                return patches
            first = self.ref_conv(reference_latents[:, :, 0])[:, :, None]
            return torch.cat([first.to(patches.dtype), patches[:, :, 1:]], dim=2)

        # The rotary embedding counts the frame of the reference, too.
        longer = torch.cat([hidden_states[:, :, :before], hidden_states], dim=2)
        hook = self.patch_embedding.register_forward_hook(embed)
        try:
            made = super().forward(
                longer, *arguments, **{**named, "return_dict": False}
            )
        finally:
            hook.remove()
        return (made[0][:, :, before:],)


class MotionController(ModelMixin, ConfigMixin):  # type: ignore[misc]  # of diffusers, untyped
    """Embeds the speed of what moves in a video as a part of the denoiser's modulation
    (DiffSynth-Studio/Wan2.1-1.3b-speedcontrol-v1).
    """

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, freq_dim: int = 256, width: int = 1536) -> None:
        """Build it for a denoiser of `width` channels; freq_dim: sines and cosines."""
        super().__init__()
        self.linear = nn.Sequential(
            nn.Linear(freq_dim, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 6 * width),
        )
        # Three layers for one vector: nothing is gained by recomputing them.
        self.gradient_checkpointing = False

    def forward(self, speed: Tensor) -> Tensor:
        """Return (batch, 6, width) of speeds, fp32, 0 to 100, (batch,)."""
        waves = get_timestep_embedding(
            speed * 10,
            self.config.freq_dim,
            flip_sin_to_cos=True,
            downscale_freq_shift=0,
        )
        made: Tensor = self.linear(waves.to(self.dtype))
        return made.unflatten(1, (6, -1))


class CameraAdapter(nn.Module):
    """Embeds rays per pixel as patches."""

    def __init__(self, channels: int, width: int, patch: Sequence[int]) -> None:
        """Build it for patches of `width` channels."""
        super().__init__()
        size = tuple(patch)
        self.conv = nn.Conv2d(channels * DOWNSCALE**2, width, size, size)
        self.residual_blocks = nn.Sequential(ResidualBlock(width))

    def forward(self, rays: Tensor) -> Tensor:
        """Return (batch, width, frames, h / 16, w / 16) of (batch, channels, frames, h, w)."""
        batch = len(rays)
        images = pixel_unshuffle(rays.transpose(1, 2).flatten(0, 1), DOWNSCALE)
        made: Tensor = self.residual_blocks(self.conv(images))
        return made.unflatten(0, (batch, -1)).transpose(1, 2)


class ResidualBlock(nn.Module):
    """Two convolutions, whose result is added to what they get."""

    def __init__(self, width: int) -> None:
        """Build it for `width` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape, (batch, width, h, w)."""
        added: Tensor = self.conv2(self.conv1(images).relu())
        return images + added


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
