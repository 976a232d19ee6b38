"""The DoRA of one layer.

DoRA (Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation"): the rows of
W + (alpha / rank) B A get lengths that are trained, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from dstrain.plugin.lora import LoraLayer, LoraType, pair_of
from torch import Tensor


@dataclass(frozen=True)
class DoraLayer(LoraLayer):
    """The DoRA of one layer: a LoRA, and the lengths of the rows of what it changes."""

    magnitude: Tensor
    """(out,): the lengths of the rows of the changed weight."""
    type = "dora"
    # A factor of the product is none of what the lengths change.
    scales = False

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        total = super().changed(weight)
        magnitude = self.magnitude.float().to(weight.device)
        return (magnitude / row_lengths(total))[:, None] * total

    def parts(self) -> dict[str, Tensor]:
        """Return the matrices and the lengths by peft's names."""
        return {**super().parts(), "lora_magnitude_vector": self.magnitude}


class DoraType(LoraType):
    """DoRA by peft."""

    name = "dora"
    keys = rf"{LoraType.keys}|lora_magnitude_vector(?:\.[^.]+)*"
    fields = MappingProxyType({"use_dora": True})
    linear_only = True
    below = False

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> DoraLayer:
        """Return a layer of its tensors; raises ValueError for one that lacks any."""
        down, up = pair_of(parts)
        lengths = [one for name, one in parts.items() if "magnitude" in name]
        if len(lengths) != 1:
            raise ValueError("lack the lengths of DoRA")
        if lengths[0].shape != (len(up),) or up.ndim != 2:
            shape = tuple(lengths[0].shape)
            raise ValueError(
                f"have no length of DoRA for each of {len(up)} rows: {shape}"
            )
        own = float(len(down)) if alpha is None else alpha
        return DoraLayer(down, up, own, lengths[0])


TYPE = DoraType()


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row (out,) of a weight (out, in)."""
    return cast(Tensor, torch.linalg.vector_norm(weight, dim=1))


def lengths_of(layer: Any) -> Tensor | None:
    """Return the lengths of a layer's rows; None if it is no DoRA."""
    return layer.magnitude if isinstance(layer, DoraLayer) else None


def lora_layer(
    down: Tensor, up: Tensor, alpha: float, lengths: Tensor | None
) -> LoraLayer:
    """Return a LoRA layer, or with lengths a DoRA layer."""
    if lengths is None:
        return LoraLayer(down, up, alpha)
    return DoraLayer(down, up, alpha, lengths)
