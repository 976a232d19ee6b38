"""Add the effect of LoRA layers to the weights of a network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dstrain.config import LoraFile
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora.layers import LoraLayer
from dstrain.lora.reading.contents import Lora
from dstrain.models import StoredLinear


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


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return a network's parameter by the name that it has without LoRA layers; raises
    UsageError for one that is quantized.
    """
    layer, _, end = name.rpartition(".")
    owner = module.get_submodule(layer)
    owner = getattr(owner, "base_layer", owner)
    if end == "weight" and isinstance(owner, StoredLinear):
        what = f"contains a difference of {name}, which is quantized"
        raise UsageError("--lora", what, "leave that component as it is loaded")
    parameter: nn.Parameter = getattr(owner, end)
    return parameter


@torch.no_grad()
def add_differences(
    module: nn.Module, differences: Mapping[str, Tensor], scale: float = 1.0
) -> None:
    """Add `scale` times these differences to a network's own parameters, computed in
    fp32 and rounded to their dtype; raises UsageError, before any is added, for a
    parameter that is quantized.
    """
    own = {name: own_parameter(module, name) for name in differences}
    for name, parameter in own.items():
        parameter.copy_(changed_by(parameter, differences[name], scale))


def changed_by(parameter: Tensor, difference: Tensor, scale: float) -> Tensor:
    """Return a parameter with `scale` times a difference, in its dtype."""
    added = scale * difference.float().to(parameter.device)
    return (parameter.float() + added).to(parameter.dtype)


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
