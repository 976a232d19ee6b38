"""Add the effect of LoRA layers to the weights of a network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dstrain.config import LoraFile
from dstrain.errors import StateError, first_few
from dstrain.lora.foreign.differences import own_parameter
from dstrain.lora.layers import LoraLayer
from dstrain.lora.reading.contents import Lora


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


@contextmanager
def left_out(module: nn.Module, lora: Lora, file: LoraFile) -> Iterator[None]:
    """Within, a network computes without a LoRA that was merged into it: what that adds to
    a layer's output is taken off again, and weights stay as they are.

    Raises StateError for a file with anything but LoRA of linear layers.
    """
    others = [*lora.merged, *lora.differences]
    with ExitStack() as stack:
        for name, layer in lora.layers.items():
            owner: Any = module.get_submodule(name)
            owner = getattr(owner, "base_layer", owner)
            if layer.type != "lora" or not isinstance(owner, nn.Linear):
                others.append(name)
                continue
            assert isinstance(layer, LoraLayer)
            hook = partial(_without, layer, file.scale)
            stack.callback(owner.register_forward_hook(hook).remove)
        if others:
            what = f"previews can leave out LoRA of linear layers alone, not {first_few(others)}"
            raise StateError(file.path, what, "train without --preview_prompt")
        yield


def _without(
    layer: LoraLayer,
    strength: float,
    linear: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> Tensor:
    down, up = (matrix.to(inputs[0]) for matrix in (layer.down, layer.up))
    return output - strength * layer.scale * (inputs[0] @ down.T @ up.T)
