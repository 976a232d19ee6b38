"""The unit that turns a mask of the loss into a value as large as the latents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from dstrain.data.cells import mask_channel
from dstrain.errors import UsageError
from dstrain.graph import FunctionSpec
from dstrain.graph.function_spec import versioned
from dstrain.graph.unit import Unit

MASK = "loss_mask"
"""The input."""
UNMASKED_WEIGHT = "unmasked_weight"
LOSS_WEIGHT = "loss_weight"
"""The value, and the parameter of a loss that takes it."""
LATENTS = "input_latents"
"""The value that a loss compares with, whose image or video is masked."""


class LossWeight(TypedDict):
    """How much a loss counts each position of the latents."""

    loss_weight: Tensor
    """(1, 1, ..., latent height, latent width), fp32, 0 to 1."""


@versioned(1)
def weigh_latents(
    latent_shape: tuple[int, ...], loss_mask: Image.Image, unmasked_weight: float
) -> LossWeight:
    """Average a mask over the part of the image that each position of the latents is of.

    Args:
        latent_shape: (1, channels, ..., latent height, latent width).
        loss_mask: As large as the image; its last channel is 255 for what counts.
        unmasked_weight: The weight where it is 0.
    """
    if len(latent_shape) < 4:
        what = f"latents of shape {list(latent_shape)} have no height and width"
        raise UsageError("masks", what)
    pixels = torch.from_numpy(np.array(mask_channel(loss_mask)))
    height, width = latent_shape[-2:]
    mask = adaptive_avg_pool2d(pixels[None].float() / 255, (height, width))
    # In this form, 1 stays 1 exactly, and an unmasked weight of 0 leaves the mask.
    weight = 1 - (1 - unmasked_weight) * (1 - mask)
    one_each = [1] * (len(latent_shape) - 2)
    return {"loss_weight": weight.view(*one_each, height, width)}


@dataclass(frozen=True, init=False)
class MaskUnit(Unit):
    """The unit of a variant that makes the weight, without what encodes the image: a
    variant says how large its latents are.
    """

    latent_shape: FunctionSpec = field(init=False)

    def __init__(self, latent_shape: FunctionSpec) -> None:
        """Build the unit of a variant with this `latent_shape`."""
        super().__init__(weigh_latents, given=("latent_shape",))
        # The class is frozen.
        object.__setattr__(self, "latent_shape", latent_shape)
        object.__setattr__(self, "inputs", {**self.inputs, **latent_shape.inputs})
        object.__setattr__(self, "components", latent_shape.components)

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Return what the unit is, with what `latent_shape` is."""
        return {**super().identity, "latent shape": self.latent_shape.identity}

    def call(self, arguments: Mapping[str, Any]) -> LossWeight:
        """Compute the shape from what it asks for, and the weight."""
        shape = self.latent_shape
        asked = {*shape.inputs, *shape.components}
        given = {name: value for name, value in arguments.items() if name in asked}
        sides = tuple(shape.function(**given))
        return weigh_latents(sides, arguments[MASK], arguments[UNMASKED_WEIGHT])
