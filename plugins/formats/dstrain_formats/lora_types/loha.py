"""The LoHa of one layer.

LoHa (Hyeon-Woo et al. 2022, "FedPara: low-rank Hadamard product for communication-
efficient federated learning"): (alpha / rank) (A1 B1) * (A2 B2), element by element.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.plugin.lora import LoraType, rescaled
from torch import Tensor

LOHA_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True)
class LohaLayer:
    """The LoHa of one layer: (alpha / rank) (A1 B1) * (A2 B2)."""

    first: tuple[Tensor, Tensor]
    """(out, rank) and (rank, in)."""
    second: tuple[Tensor, Tensor]
    alpha: float
    type = "loha"
    scales = True

    @property
    def rank(self) -> int:
        """Return the rank of both products."""
        return len(self.first[1])

    @property
    def scale(self) -> float:
        """Return what the product is multiplied by."""
        return self.alpha / self.rank

    @property
    def acts(self) -> bool:
        """Return whether it changes a weight."""
        return bool(self.change().any())

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weight, (out, in)."""
        return (len(self.first[0]), self.first[1].shape[1])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a weight of this shape."""
        return shape == self.shape

    def with_alpha(self, alpha: float) -> "LohaLayer":
        """Return a layer with the same effect that has this alpha."""
        up = rescaled(self.first[0], self.alpha, alpha)
        return replace(self, first=(up, self.first[1]), alpha=alpha)

    def folded(self) -> "LohaLayer":
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self.with_alpha(float(self.rank))

    def change(self) -> Tensor:
        """Return what is added to the weight, in fp32."""
        one, other = (
            up.float() @ down.float() for up, down in (self.first, self.second)
        )
        return self.scale * one * other

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        return weight + self.change().to(weight.device)

    def rows(self, chosen: Tensor) -> "LohaLayer":
        """Return the layer of some rows of the weight."""
        first = (self.first[0][chosen], self.first[1])
        second = (self.second[0][chosen], self.second[1])
        return replace(self, first=first, second=second)

    def parts(self) -> dict[str, Tensor]:
        """Return the matrices by LyCORIS' and peft's names for them."""
        return dict(zip(LOHA_PARTS, (*self.first, *self.second), strict=True))


class LinearType(LoraType):
    """A type for linear layers whose weights are as loaded; it is alone on a layer."""

    diffusers = False
    linear_only = True
    stored = False
    dropout = False
    below = False

    def configured(self, numbers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return peft's configuration; its field for the alpha is `alpha`."""
        numbers = {**numbers, "alpha": numbers["lora_alpha"]}
        del numbers["lora_alpha"]
        return self.in_peft(**numbers)

    def numbers_of(self, wrapped: Any, adapter: str) -> tuple[int, float]:
        """Return the rank and the alpha of a layer that peft has wrapped."""
        return wrapped.r[adapter], wrapped.alpha[adapter]


class LohaType(LinearType):
    """LoHa by peft."""

    name = "loha"
    keys = r"hada_w[12]_[ab]"
    kind = "LoHaConfig"
    # Of several files for one layer, peft cannot add the LoHa beside others.
    merged = True

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> LohaLayer:
        """Return a layer of its matrices; raises ValueError for those that lack one."""
        first, second = _factors(parts)
        own = float(len(first[1])) if alpha is None else alpha
        return LohaLayer(first, second, own)


TYPE = LohaType()


def _factors(
    own: Mapping[str, Tensor],
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the two products; raises ValueError for what is not all of both."""
    if own.keys() != set(LOHA_PARTS) or any(one.ndim != 2 for one in own.values()):
        raise ValueError("have not all four matrices")
    a, b, c, d = (own[part] for part in LOHA_PARTS)
    if a.shape[1] != len(b) or c.shape[1] != len(d) or len(b) != len(d):
        raise ValueError("have matrices of different ranks")
    if len(a) != len(c) or b.shape[1] != d.shape[1]:
        raise ValueError("have two products of different shapes")
    return (a, b), (c, d)
