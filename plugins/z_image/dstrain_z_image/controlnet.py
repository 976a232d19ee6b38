"""The ControlNet (z_image_transformer2d_control.py of aigc-apps/VideoX-Fun)."""

from typing import Any

import torch
from diffusers import ZImageControlNetModel
from dstrain.plugin.functional import pack
from torch import Tensor


class ControlNet(ZImageControlNetModel):
    """That of diffusers, random where it is zero: nothing behind a zero is reached."""

    _repeated_blocks = ("ZImageControlTransformerBlock",)
    gradient_checkpointing = False

    def __init__(self, **named: Any) -> None:
        """Build it."""
        super().__init__(**named)
        for name, layer in self.named_modules():
            if name.endswith(("before_proj", "after_proj")):
                layer.reset_parameters()

    @property
    def layers_by_block(self) -> dict[str, tuple[Any, str]]:
        """Return by block of the denoiser the layer beside it, and the block before it."""
        refiners = [f"noise_refiner.{i}" for i in self.control_refiner_layers_places]
        names = [*refiners, *(f"layers.{i}" for i in self.control_layers_places)]
        layers = [*self.control_noise_refiner, *self.control_layers]
        pairs = zip(layers, ["", *names[:-1]], strict=True)
        return dict(zip(names, pairs, strict=True))

    def forward(self, latents: Tensor) -> Tensor:
        """Return the tokens of images, (batch, 16, h, w), of which nothing is painted."""
        missing = self.config.control_in_dim - latents.shape[1]
        image = torch.nn.functional.pad(latents, (0, 0, 0, 0, 0, missing))
        patches = pack(image).unflatten(2, (-1, 4)).transpose(2, 3)  # channels are last
        embedded: Tensor = self.control_all_x_embedder["2-1"](patches.flatten(2))
        return embedded
