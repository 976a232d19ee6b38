"""Changes of a weight that no adapter here holds, and that are merged into it exactly:
LoHa, and a LoKr of several layers at once.

LoHa (Hyeon-Woo et al. 2022, "FedPara: low-rank Hadamard product for communication-
efficient federated learning"): (alpha / rank) (A1 B1) * (A2 B2), element by element.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dstrain.errors import StateError
from dstrain.lora.key_names import Rows
from dstrain.lora.lokr import parts_of_layers
from dstrain.models.formats import Shape

LOHA_KEY = re.compile(r"(?P<layer>.+)\.(?P<part>hada_w[12]_[ab]|alpha)")
LOHA_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True)
class MergedLayer:
    """A change of one layer's weight that can only be merged into it."""

    type: str
    """What it is, for errors."""
    change: Callable[[], Tensor]
    """Computes what is added to the weight, in fp32."""

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        return weight + self.change().to(weight.device)


@dataclass(frozen=True)
class LohaWeights:
    """One layer as a file has it."""

    first: tuple[Tensor, Tensor]
    """(out, rank) and (rank, in)."""
    second: tuple[Tensor, Tensor]
    alpha: float | None
    named: bool = False

    @property
    def rank(self) -> int:
        """Return the rank of both products."""
        return len(self.first[1])

    @property
    def has_product(self) -> bool:
        """Return whether it has a rank, and an alpha that counts: always."""
        return True

    def layer(self, alpha: float) -> "LohaLayer":
        """Return the layer with an alpha."""
        return LohaLayer(self.first, self.second, alpha / self.rank)


@dataclass(frozen=True)
class LohaLayer:
    """The LoHa of one layer: scale (A1 B1) * (A2 B2)."""

    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    scale: float

    @property
    def shape(self) -> Shape:
        """Return the shape of the weight, (out, in)."""
        return (len(self.first[0]), self.first[1].shape[1])

    def change(self) -> Tensor:
        """Return what is added to the weight, in fp32."""
        one, other = (
            up.float() @ down.float() for up, down in (self.first, self.second)
        )
        return self.scale * one * other

    def rows(self, chosen: Tensor) -> "LohaLayer":
        """Return the layer of some rows of the weight."""
        first = (self.first[0][chosen], self.first[1])
        second = (self.second[0][chosen], self.second[1])
        return replace(self, first=first, second=second)


def parse_loha(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, LohaWeights]:
    """Put the matrices of each layer together; raises StateError for those that are
    missing or do not fit each other, and what `parts_of_layers` raises.
    """
    parts = parts_of_layers(path, tensors, LOHA_KEY, "LoHa")
    found = {}
    for name, own in parts.items():
        if not own.keys() >= set(LOHA_PARTS):
            what = f"incomplete LoRA file: {name} has only {', '.join(own)}"
            raise StateError(path, what)
        a, b, c, d = (own[part] for part in LOHA_PARTS)
        if a.shape[1] != len(b) or c.shape[1] != len(d) or len(b) != len(d):
            raise StateError(path, f"{name} has matrices of different ranks")
        if len(a) != len(c) or b.shape[1] != d.shape[1]:
            raise StateError(path, f"{name} has two products of different shapes")
        alpha = float(own["alpha"]) if "alpha" in own else None
        found[name] = LohaWeights((a, b), (c, d), alpha)
    return found


def of_each(
    kind: str, change: Callable[[Tensor], Tensor], rows: Sequence[Rows]
) -> dict[str, MergedLayer]:
    """Return the changes of the network's layers that one layer of a file stands for.

    Args:
        kind: What it is, for errors.
        change: (indices of rows) -> these rows of what the file's layer adds.
        rows: Which rows are of which layer.
    """
    found = {}
    for name in dict.fromkeys(one.layer for one in rows):
        own = sorted(
            (one for one in rows if one.layer == name), key=lambda one: one.offset
        )
        chosen = torch.cat([torch.arange(one.start, one.stop) for one in own])
        found[name] = MergedLayer(kind, partial(change, chosen))
    return found
