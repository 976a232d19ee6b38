"""Keepers of tests: one that stores weights in other numbers, one that leaves some in RAM."""

from collections.abc import Callable, Collection

import torch
from dstrain.plugin import Keeper
from dstrain.plugin.functional import StoredLinear
from torch import Tensor, nn

SCALE = 64


class HalvedLinear(StoredLinear):
    """A layer whose weight is stored as int8 with one scale."""

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        stored = (weight.detach().float() * SCALE).round().to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scale", torch.tensor(1 / SCALE), persistent=False)

    def restored(self) -> Tensor:
        scale: Tensor = self.get_buffer("scale")
        return self.weight.detach() * scale


def halved(linear: nn.Linear, weight: Tensor) -> nn.Linear:
    return HalvedLinear(linear, weight)


class Storing(Keeper):
    """Stores the weight of each linear layer by a function: (layer, weight) -> layer."""

    kind = "quantize"

    def __init__(
        self,
        components: Collection[str],
        store: Callable[[nn.Linear, Tensor], nn.Linear] = halved,
    ) -> None:
        self.components = components
        self.store = store

    def place(
        self, component: str, network: nn.Module, name: str, weight: Tensor
    ) -> Tensor:
        layer, _, own = name.rpartition(".")
        linear = network.get_submodule(layer)
        if own != "weight" or not isinstance(linear, nn.Linear):
            return weight
        stored = self.store(linear, weight)
        network.set_submodule(layer, stored)
        return stored.weight


class InRam(Keeper):
    """Leaves the weights whose names begin so in RAM."""

    def __init__(self, components: Collection[str], *beginnings: str) -> None:
        self.components = components
        self.beginnings = beginnings

    def is_in_ram(self, component: str, network: nn.Module, name: str) -> bool:
        return name.startswith(self.beginnings)
