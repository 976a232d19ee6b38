"""Add the effect of LoRA layers to the weights of a network."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.config import LoraFile
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora.layers import Change, LoraLayer, Several
from dstrain.lora.stored import Lora
from dstrain.models import StoredLinear


@torch.no_grad()
def merge(
    module: nn.Module, changes: Mapping[str, Change], strength: float = 1.0
) -> None:
    """Change a network's own parameters, named as without LoRA layers, as `merged` does.

    Raises UsageError, before any is changed, for a weight that is stored in another form.
    """
    owners: dict[str, Any] = {}
    for name in changes:
        layer, _, end = name.rpartition(".")
        owner: Any = module.get_submodule(layer)
        # peft may have wrapped it.
        owners[name] = owner = getattr(owner, "base_layer", owner)
        if end == "weight" and isinstance(owner, StoredLinear):
            what = f"changes {name}, which is stored in another form"
            raise UsageError("--lora", what, "leave that component as it is loaded")
    for name, change in changes.items():
        parameter = getattr(owners[name], name.rpartition(".")[2])
        parameter.copy_(merged(owners[name], parameter, change, strength))


@torch.no_grad()
def merged(
    module: nn.Module, weight: Tensor, change: Change, strength: float = 1.0
) -> Tensor:
    """Return the parameter of a module with `strength` times a change, computed in fp32
    and then rounded to the parameter's dtype.
    """
    if isinstance(change, Several):
        for one in change.changes:
            weight = merged(module, weight, one, strength)
        return weight
    exact = weight.float()
    if isinstance(module, nn.Embedding) and isinstance(change, LoraLayer):
        # Its weight is (vocabulary, channels).
        changed = change.changed(exact.T).T.contiguous()
    else:
        changed = change.changed(exact)
    if strength != 1:
        changed = exact + strength * (changed - exact)
    return changed.to(weight.dtype)


@contextmanager
def left_out(module: nn.Module, lora: Lora, file: LoraFile) -> Iterator[None]:
    """Within, a network computes without a LoRA that was merged into it: what that adds to
    a layer's output is taken off again, and weights stay as they are.

    Raises StateError for a file with anything but LoRA of linear layers.
    """
    others = list(lora.merged)
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
            what = f"only LoRA of linear layers can be left out of images, not {first_few(others)}"
            raise StateError(file.path, what)
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
