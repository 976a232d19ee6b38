"""The LoKr of one layer.

LoKr (Yeh et al. 2024, "Navigating text-to-image customization: from LyCORIS fine-tuning
to model evaluation"): y = W x + (alpha / rank) (W1 (x) W2) x, with the Kronecker product
of two small matrices, each of which may itself be a product of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from dstrain.plugin import TrainConfig, UsageError
from dstrain.plugin.lora import LoraOptions, rescaled
from torch import Tensor, nn

from dstrain_formats.lora_types.loha import LinearType
from dstrain_formats.options import FormatOptions


@dataclass(frozen=True)
class LokrLayer:
    """The LoKr of one layer: (alpha / rank) (first (x) second)."""

    first: tuple[Tensor, ...]
    """A matrix (a, b), or two whose product it is: (a, rank) and (rank, b)."""
    second: tuple[Tensor, ...]
    """The same, (c, d); the layer's weight is (a c, b d)."""
    rank: int
    alpha: float
    type = "lokr"
    scales = True

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

    def with_alpha(self, alpha: float) -> "LokrLayer":
        """Return it as it is: what it fills says its scale."""
        return self

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


class LokrType(LinearType):
    """LoKr by peft."""

    name = "lokr"
    keys = r"lokr_w[12](?:_[ab])?"
    kind = "LoKrConfig"
    sizes = "--lora_rank and --lokr_factor"

    def settings(self, options: LoraOptions) -> dict[str, Any]:
        """Return the factor, if one is given."""
        if not isinstance(options, TrainConfig):
            return {}
        factor = options.of(FormatOptions).lokr_factor
        return {} if factor is None else {"factor": factor}

    def configured(self, numbers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return peft's LoKrConfig."""
        factor = settings.get("factor", -1)
        return super().configured({**numbers, "decompose_factor": factor}, settings)

    def to_hold(self, layers: Mapping[str, Any], numbers: dict[str, Any]) -> Any:
        """Return the smallest configuration: `hold` replaces the matrices, which may
        have any shapes.
        """
        targets = numbers["target_modules"]
        return self.in_peft(r=1, alpha=1, decompose_factor=1, target_modules=targets)

    def layer(
        self, parts: Mapping[str, Tensor], rank: int | None, alpha: float | None
    ) -> LokrLayer:
        """Return a layer of its matrices; raises ValueError for those that lack one."""
        first, second = (_matrices(parts, name) for name in ("lokr_w1", "lokr_w2"))
        if rank is None:
            products = [one for one in (first, second) if len(one) == 2]
            rank = products[-1][0].shape[1] if products else 1
        return LokrLayer(first, second, rank, float(rank) if alpha is None else alpha)

    def has_alpha(self, parts: Mapping[str, Tensor]) -> bool:
        """Return whether a part is a product: where none is, LyCORIS and ComfyUI multiply
        by 1, whatever alpha says.
        """
        return len(parts) > 2

    @torch.no_grad()
    def fill(self, own: Any, layer: Any) -> None:
        """Copy a layer, with the scale of the one it is copied into."""
        super().fill(own, layer.with_scale(own.scale))

    def hold(self, wrapped: Any, adapter: str, own: Any, layer: Any) -> None:
        """Replace the matrices by those of a layer."""
        device = wrapped.lokr_w1[adapter].device
        for part in ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"):
            matrices = getattr(wrapped, part)
            if adapter in matrices:
                del matrices[adapter]
        for part, matrix in layer.folded().parts().items():
            weight = matrix.detach().float().to(device)
            parameter = nn.Parameter(weight, requires_grad=False)
            getattr(wrapped, part)[adapter] = parameter

    def shapes_of(self, layer: Any) -> str:
        """Return the shapes of the matrices, which rank and factor alone do not decide."""
        return ", ".join(str(tuple(one.shape)) for one in layer.parts().values())

    def check(self, ranks: Mapping[str, int], network: nn.Module, flag: str) -> None:
        """Refuse layers that are stored in another form."""
        if flag != "--lora":
            return
        for name in ranks:
            if hasattr(network.get_submodule(name), "restored"):
                what = f"LoKr cannot be added to {name}, which is quantized"
                raise UsageError(flag, what, "leave the component as it is loaded")


TYPE = LokrType()


def _matrices(found: Mapping[str, Tensor], name: str) -> tuple[Tensor, ...]:
    """Return the one or two matrices of a part."""
    ends = [end for end in ("", "_a", "_b") if name + end in found]
    if ends not in ([""], ["_a", "_b"]):
        raise ValueError(f"have not all of {name}")
    matrices = tuple(found[name + end] for end in ends)
    shapes = " and ".join(str(tuple(one.shape)) for one in matrices)
    if any(one.ndim != 2 for one in matrices):
        raise ValueError(f"have what is no matrix: {shapes}")
    if len(matrices) == 2 and matrices[0].shape[1] != len(matrices[1]):
        raise ValueError(f"have matrices of different ranks: {shapes}")
    return matrices


def _product(matrices: tuple[Tensor, ...]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]
