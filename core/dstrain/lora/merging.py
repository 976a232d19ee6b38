"""Add the effect of LoRA layers to the weights of a network."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dstrain.lora.foreign.differences import own_parameter


class Changes(Protocol):
    """A change of a layer's weight."""

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in, ...) as it is changed."""


@torch.no_grad()
def merge_layers(
    module: nn.Module, layers: Mapping[str, Changes], strength: float = 1.0
) -> None:
    """Add the layers' effect to the module's own weights, as `merged` does; raises
    UsageError, before any is changed, for a weight that is quantized.
    """
    own = {name: own_parameter(module, f"{name}.weight") for name in layers}
    for name, layer in layers.items():
        weight = own[name]
        owner: Any = module.get_submodule(name)
        # peft may have wrapped it.
        owner = getattr(owner, "base_layer", owner)
        weight.copy_(merged(owner, weight, layer, strength))


@torch.no_grad()
def merged(
    module: nn.Module, weight: Tensor, layer: Changes, strength: float = 1.0
) -> Tensor:
    """Return the weight of a module with `strength` times a layer's effect added,
    computed in fp32 and then rounded to the weight's dtype.
    """
    exact = weight.float()
    if isinstance(module, nn.Embedding):
        # Its weight is (vocabulary, channels).
        changed = layer.changed(exact.T).T.contiguous()
    else:
        changed = layer.changed(exact)
    if strength != 1:
        changed = exact + strength * (changed - exact)
    return changed.to(weight.dtype)
