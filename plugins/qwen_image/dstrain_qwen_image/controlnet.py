"""The blockwise ControlNet: what it adds to the image's tokens after each block."""

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

EPSILON = 1e-6


class ControlBlock(nn.Module):
    """The part of a `BlockwiseControlNet` for one block of the denoiser."""

    def __init__(self, width: int) -> None:
        """Build it for tokens of `width` channels."""
        super().__init__()
        self.x_rms = nn.RMSNorm(width, EPSILON)
        self.y_rms = nn.RMSNorm(width, EPSILON)
        self.input_proj = nn.Linear(width, width)
        self.act = nn.GELU()
        self.output_proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor, control: Tensor) -> Tensor:
        """Return what is added to the tokens of the image.

        Args:
            tokens: What the block makes of them, (batch, tokens, width).
            control: Those of the conditioning image, shaped alike.
        """
        both = self.x_rms(tokens) + self.y_rms(control)
        added: Tensor = self.output_proj(self.act(self.input_proj(both)))
        return added


class BlockwiseControlNet(ModelMixin, ConfigMixin):  # type: ignore[misc]  # of diffusers, untyped
    """One `ControlBlock` for each block of the denoiser, of a conditioning image that is
    embedded once (DiffSynth-Studio/Qwen-Image-Blockwise-ControlNet-Canny).
    """

    _repeated_blocks = ("ControlBlock",)
    # Each of its blocks is recomputed with the denoiser's that calls it.
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self, num_layers: int = 60, in_channels: int = 64, width: int = 3072
    ) -> None:
        """Build it for a denoiser of `num_layers` blocks and tokens of `width` channels;
        those of the conditioning image have `in_channels`.
        """
        super().__init__()
        self.img_in = nn.Linear(in_channels, width)
        self.controlnet_blocks = nn.ModuleList(
            ControlBlock(width) for _ in range(num_layers)
        )
        self.gradient_checkpointing = False

    def forward(self, control: Tensor) -> Tensor:
        """Embed the tokens of the conditioning image, (batch, tokens, in_channels), as
        its blocks take them.
        """
        embedded: Tensor = self.img_in(control)
        return embedded
