"""Add the effect of LoRA layers to the weights of a network."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dstrain.lora.lokr import Layer


@torch.no_grad()
def merge_layers(module: nn.Module, layers: Mapping[str, Layer]) -> None:
    """Add the layers' effect to the module's own weights, as `merged` does."""
    for name, layer in layers.items():
        weight = module.get_parameter(f"{name}.weight")
        weight.copy_(merged(module.get_submodule(name), weight, layer))


@torch.no_grad()
def merged(module: nn.Module, weight: Tensor, layer: Layer) -> Tensor:
    """Return the weight of a module with a layer's effect added, computed in fp32 and
    then rounded to the weight's dtype.
    """
    exact = weight.float()
    if isinstance(module, nn.Embedding):
        # Its weight is (vocabulary, channels).
        return layer.changed(exact.T).T.contiguous().to(weight.dtype)
    return layer.changed(exact).to(weight.dtype)
