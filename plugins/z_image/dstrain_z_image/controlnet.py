"""The ControlNet: a layer beside each block that refines the image's tokens, and beside
every second of the others (z_image_transformer2d_control.py of aigc-apps/VideoX-Fun).
"""

from collections.abc import Sequence

import torch
from diffusers import ZImageControlNetModel
from diffusers.configuration_utils import register_to_config
from torch import Tensor


class ControlNet(ZImageControlNetModel):
    """The ControlNet of diffusers, whose layers are called beside the denoiser's blocks.

    Its layers whose published initialization is zero are random: weights come from files,
    and nothing behind a zero would be reached in a toy.
    """

    _repeated_blocks = ("ZImageControlTransformerBlock",)
    # Its layers are recomputed with the denoiser's blocks that they are beside.
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        control_layers_places: Sequence[int] = tuple(range(0, 30, 2)),
        control_in_dim: int = 33,
        dim: int = 3840,
        n_refiner_layers: int = 2,
        n_heads: int = 30,
        n_kv_heads: int = 30,
    ) -> None:
        """Build the network.

        Args:
            control_layers_places: The numbers of the denoiser's blocks beside which it has
                a layer.
            control_in_dim: Channels of a control image: its latents, a mask of what is
                painted, and what is around that.
            dim: Channels of a token.
            n_refiner_layers: Blocks of the denoiser that refine the image's tokens.
            n_heads: Heads of attention.
            n_kv_heads: The same, of its keys and values.
        """
        super().__init__(
            control_layers_places=control_layers_places,
            control_refiner_layers_places=list(range(n_refiner_layers)),
            control_in_dim=control_in_dim,
            add_control_noise_refiner="control_noise_refiner",
            dim=dim,
            n_refiner_layers=n_refiner_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
        )
        self.gradient_checkpointing = False
        for layers in (self.control_noise_refiner, self.control_layers):
            layers[0].before_proj.reset_parameters()
            for layer in layers:
                layer.after_proj.reset_parameters()

    def forward(self, latents: Tensor) -> Tensor:
        """Return the tokens of control images, (batch, tokens, dim), without padding.

        Args:
            latents: (batch, 16, h, w); the channels of a mask are zero, which says that
                nothing is painted.
        """
        batch, channels, height, width = latents.shape
        further = latents.new_zeros(
            batch, self.config.control_in_dim - channels, height, width
        )
        image = torch.cat([latents, further], dim=1)
        patches = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        tokens = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        embedded: Tensor = self.control_all_x_embedder["2-1"](tokens)
        return embedded
