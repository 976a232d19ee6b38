"""The LoKr of one layer, and its keys in files.

LoKr (Yeh et al. 2024, "Navigating text-to-image customization: from LyCORIS fine-tuning
to model evaluation"): y = W x + (alpha / rank) (W1 (x) W2) x, with the Kronecker product
of two small matrices, each of which may itself be a product of two.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dstrain.config.options import LoraType
from dstrain.errors import StateError, first_few
from dstrain.lora.layers import LoraLayer, rescaled

LOKR_KEY = re.compile(r"(?P<layer>.+)\.(?P<part>lokr_w[12](?:_[ab])?|alpha)")


@dataclass(frozen=True)
class LokrLayer:
    """The LoKr of one layer: (alpha / rank) (first (x) second)."""

    first: tuple[Tensor, ...]
    """A matrix (a, b), or two whose product it is: (a, rank) and (rank, b)."""
    second: tuple[Tensor, ...]
    """The same, (c, d); the layer's weight is (a c, b d)."""
    rank: int
    alpha: float

    @property
    def type(self) -> LoraType:
        """Return what `--lora_type` trains such layers."""
        return "lokr"

    @property
    def scale(self) -> float:
        """Return what the product is multiplied by."""
        return self.alpha / self.rank

    @property
    def acts(self) -> bool:
        """Return whether it changes a weight."""
        return bool(_product(self.first).any() and _product(self.second).any())

    def with_scale(self, scale: float) -> "LokrLayer":
        """Return a layer with the same effect that has this scale."""
        first = rescaled(self.first[0], self.scale, scale)
        alpha = scale * self.rank
        return replace(self, first=(first, *self.first[1:]), alpha=alpha)

    def folded(self) -> "LokrLayer":
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self.with_scale(1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight, (out, in)."""
        first, second = self.first, self.second
        rows = len(first[0]) * len(second[0])
        return (rows, first[-1].shape[1] * second[-1].shape[1])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether it is for a weight of this shape."""
        return shape == self.shape

    def change(self) -> Tensor:
        """Return what is added to the weight, in fp32."""
        first = _product(self.first).float()
        return self.scale * torch.kron(first, _product(self.second).float())

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        return weight + self.change().to(weight.device)

    def parts(self) -> dict[str, Tensor]:
        """Return the matrices by LyCORIS' names for them."""
        found = {}
        for name, matrices in (("lokr_w1", self.first), ("lokr_w2", self.second)):
            ends = ("",) if len(matrices) == 1 else ("_a", "_b")
            for end, matrix in zip(ends, matrices, strict=True):
                found[name + end] = matrix
        return found


Layer = LoraLayer | LokrLayer


@dataclass(frozen=True)
class LokrWeights:
    """One layer as a file has it."""

    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]
    alpha: float | None
    """What its product is to be multiplied by, times the rank."""
    named: bool = False

    @property
    def rank(self) -> int:
        """Return the rank of what is a product; where nothing is, LyCORIS and ComfyUI
        multiply by 1, whatever alpha says.
        """
        products = [one for one in (self.first, self.second) if len(one) == 2]
        return products[-1][0].shape[1] if products else 1

    @property
    def has_product(self) -> bool:
        """Return whether it has a rank, and an alpha that counts."""
        return len(self.first) + len(self.second) > 2

    def layer(self, alpha: float) -> LokrLayer:
        """Return the layer with an alpha."""
        return LokrLayer(self.first, self.second, self.rank, alpha)


def parts_of_layers(
    path: Path, tensors: Mapping[str, Tensor], key: re.Pattern[str], kind: str
) -> dict[str, dict[str, Tensor]]:
    """Return layer -> part -> the tensors of a file of LyCORIS; raises StateError for keys
    of something else, and for values that are not finite numbers.

    Args:
        path: The file, for errors.
        tensors: Key -> tensor.
        key: Tells the `layer` and the `part` of a key: "alpha", or a matrix.
        kind: What the layers are called: LoKr or LoHa.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        hit = key.fullmatch(name)
        if hit is None:
            unknown.append(name)
            continue
        is_alpha = hit["part"] == "alpha"
        has_form = tensor.numel() == 1 if is_alpha else tensor.ndim == 2
        if not has_form or tensor.numel() == 0 or not tensor.float().isfinite().all():
            form = "number" if is_alpha else "matrix of numbers"
            raise StateError(path, f"{name} is not a finite {form}")
        parts.setdefault(hit["layer"], {})[hit["part"]] = tensor
    if unknown:
        what = f"{len(unknown)} of its {len(tensors)} keys are of no {kind} layer"
        advice = f"{kind} of convolutions and with DoRA is not supported"
        raise StateError(path, what, f"the first: {first_few(unknown)}", advice)
    return parts


def parse_lokr(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, LokrWeights]:
    """Put the matrices of each layer together; raises StateError for those that are
    missing, and what `parts_of_layers` raises.
    """
    parts = parts_of_layers(path, tensors, LOKR_KEY, "LoKr")
    layers = {}
    for name, found in parts.items():
        first = _matrices(path, name, "lokr_w1", found)
        second = _matrices(path, name, "lokr_w2", found)
        alpha = float(found["alpha"]) if "alpha" in found else None
        weights = LokrWeights(first, second, alpha)
        if not weights.has_product:
            weights = replace(weights, alpha=float(weights.rank))
        layers[name] = weights
    return layers


def _matrices(
    path: Path, layer: str, name: str, found: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """Return the one or two matrices of a part."""
    ends = [end for end in ("", "_a", "_b") if name + end in found]
    if ends not in ([""], ["_a", "_b"]):
        have = ", ".join(found)
        what = f"incomplete LoRA file: {layer} has only {have}, without all of {name}"
        raise StateError(path, what)
    matrices = tuple(found[name + end] for end in ends)
    if len(matrices) == 2 and matrices[0].shape[1] != len(matrices[1]):
        shapes = " and ".join(str(tuple(one.shape)) for one in matrices)
        raise StateError(path, f"{layer} has matrices of different ranks: {shapes}")
    return matrices


def _product(matrices: tuple[Tensor, ...]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]
