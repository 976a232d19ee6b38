"""A keeper: weights of linear layers lie in fp16 in files, from which they are paged in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from disk_options import DiskOptions
from dstrain.plugin import Identity, Keeper, KeeperRequest, hookimpl, split_commas
from dstrain.plugin.functional import StoredLinear
from torch import Tensor, nn

api = 2


class OnDisk(StoredLinear):
    """A layer whose weight is a mapped file, which is gone when the layer is."""

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        with NamedTemporaryFile() as file:
            file.write(weight.half().numpy().tobytes())
            file.flush()
            mapped = torch.from_file(file.name, False, weight.numel(), dtype=torch.half)
        self.weight = nn.Parameter(mapped.view_as(weight), requires_grad=False)
        self.bias = linear.bias

    def restored(self) -> Tensor:
        return self.weight.detach().to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.restored().to(x.dtype), self.bias)


@dataclass(eq=False)
class Disk(Keeper):
    """Replaces layers as their weights are read."""

    components: Sequence[str]
    kind = "quantize"
    flag = "--on_disk"

    def identity(self, component: str, config: Mapping[str, Any] | None) -> Identity:
        return Identity("disk", True, f"weights of {component} on disk")

    def place(self, component: str, network: Any, name: str, weight: Tensor) -> Tensor:
        layer, _, own = name.rpartition(".")
        linear = network.get_submodule(layer)
        if own != "weight" or type(linear) is not nn.Linear:
            return weight
        network.set_submodule(layer, OnDisk(linear, weight))
        return network.get_submodule(layer).weight


@hookimpl
def dstrain_keepers(request: KeeperRequest) -> Sequence[Keeper]:
    names = split_commas(request.options.of(DiskOptions).on_disk)
    found = [one for what in names for one in request.named("--on_disk", what)]
    return [Disk(found)] if found else []
