"""The DoRA of one layer.

DoRA (Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation"): the rows of
W + (alpha / rank) B A get lengths that are trained, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from dstrain.plugin.lora import LoraLayer, LoraType, pair_of
from torch import Tensor


@dataclass(frozen=True)
class DoraLayer(LoraLayer):
    """The DoRA of one layer: a LoRA, and the lengths of the rows of what it changes."""

    magnitude: Tensor
    """(out,): the lengths of the rows of the changed weight."""

    @property
    def type(self) -> str:
        """Return what `--lora_type` trains such layers."""
        return "dora"

    @property
    def scales(self) -> bool:
        """Return False: a factor of the product is none of what the lengths change."""
        return False

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        total = super().changed(weight)
        return (self._magnitude_on(weight) / row_lengths(total))[:, None] * total

    def at_strength(self, weight: Tensor, strength: float) -> "DoraLayer":
        """Return a layer whose change of this fp32 weight is `strength` times this one's:
        peft would scale the product alone, and not what the lengths change.
        """
        added = super().changed(weight)
        ratio = strength * self._magnitude_on(weight) / row_lengths(added)
        # W + s (m / n (W + BA) - W) = (1 - s + s m / n) W + (s m / n) BA
        own = 1 - strength + ratio
        up = self.up.float() * (ratio / own)[:, None].to(self.up.device)
        total = LoraLayer(self.down, up, self.alpha).changed(weight)
        return replace(self, up=up, magnitude=own * row_lengths(total))

    def parts(self) -> dict[str, Tensor]:
        """Return the matrices and the lengths by peft's names."""
        return {**super().parts(), "lora_magnitude_vector": self.magnitude}

    def _magnitude_on(self, weight: Tensor) -> Tensor:
        return self.magnitude.float().to(weight.device)


class DoraType(LoraType):
    """DoRA by peft."""

    name = "dora"
    keys = rf"{LoraType.keys}|lora_magnitude_vector(?:\.weight)?"
    fields = MappingProxyType({"use_dora": True})
    linear_only = True
    below = False

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> DoraLayer:
        """Return a layer of its tensors; raises ValueError for one that lacks any."""
        down, up = pair_of(parts)
        lengths = [one for name, one in parts.items() if "magnitude" in name]
        if not lengths:
            raise ValueError("lack the lengths of DoRA")
        own = float(len(down)) if alpha is None else alpha
        return DoraLayer(down, up, own, lengths[0])


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row (out,) of a weight (out, in)."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return lengths


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
