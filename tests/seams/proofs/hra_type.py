"""A type of layers that peft has: HRA, Householder reflections of what a layer takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dstrain.plugin import UsageError, hookimpl
from dstrain.plugin.lora import Layer, LoraType
from peft import HRAConfig
from torch import Tensor

api = 2


@dataclass(frozen=True)
class HraLayer(Layer):
    """Reflections by the columns of a matrix (in, rank)."""

    u: Tensor
    type = "hra"
    rank = property(lambda self: self.u.shape[1])
    acts = property(lambda self: bool(self.u.any()))

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape[1:] == self.u.shape[:1]

    def changed(self, weight: Tensor) -> Tensor:
        for one in torch.nn.functional.normalize(self.u.float(), dim=0).T:
            weight = weight - 2 * torch.outer(weight @ one, one)
        return weight

    def parts(self) -> dict[str, Tensor]:
        return {"hra_u": self.u}


class HraType(LoraType):
    """HRA by peft."""

    name = "hra"
    keys = "hra_u"
    diffusers = stored = dropout = below = False
    linear_only = merged = True

    def configured(self, numbers: dict[str, Any], settings: Mapping[str, Any]) -> Any:
        if numbers["rank_pattern"] or numbers["lora_alpha"] != numbers["r"]:
            what = "hra has one rank for all layers, and no alpha"
            raise UsageError("--lora_rank", what)
        return HRAConfig(r=numbers["r"], target_modules=numbers["target_modules"])

    def numbers_of(self, wrapped: Any, adapter: str) -> tuple[int, float]:
        return wrapped.hra_r[adapter], wrapped.hra_r[adapter]

    def layer(self, parts: Mapping[str, Tensor], rank: Any, alpha: Any) -> HraLayer:
        return HraLayer(parts["hra_u"])


@hookimpl
def dstrain_lora_types() -> Sequence[LoraType]:
    return [HraType()]
