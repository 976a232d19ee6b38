"""What autograd really saves of a step."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from dstrain import Sample, SampleKey, TrainingModule, UsageError
from dstrain.models.execution import checkpoint_through
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


def saved(module: TrainingModule, batch: list[Sample]) -> dict[int, int]:
    """What autograd really saves, weights aside: where it lies, and its bytes."""
    weights = {
        tensor.untyped_storage().data_ptr()
        for network in module.pipeline.components.values()
        if isinstance(network, nn.Module)
        for tensor in (*network.parameters(), *network.buffers())
    }
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage
        return tensor

    keys = [SampleKey(0, 0, 0, row) for row in range(len(batch))]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = module.losses(batch, keys)
    del losses
    return {place: storage.nbytes() for place, storage in found.items()}


def saved_in_blocks(
    module: TrainingModule, batch: list[Sample]
) -> tuple[int, int, int]:
    """The bytes that autograd really saves outside of the networks' blocks, those of the
    other inputs of blocks, and the most that one block saves by itself.
    """
    inputs: dict[int, Tensor] = {}
    blocks: list[int] = []

    def block(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        for one in tree_leaves((args, named)):
            if isinstance(one, Tensor):
                inputs[one.untyped_storage().data_ptr()] = one
        inside: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            inside[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function(*args, **named)
        # An adapter acts around the block that is called last.
        owner: Any = function.args[-1] if isinstance(function, partial) else function
        own = {one.untyped_storage().data_ptr() for one in owner.parameters()}
        blocks.append(sum(size for key, size in inside.items() if key not in own))
        return result

    for name, network in module.networks.items():
        with suppress(UsageError):
            checkpoint_through(name, network, block)
    outside = saved(module, batch)
    others = [one for place, one in inputs.items() if place not in outside]
    sizes = [one.untyped_storage().nbytes() for one in others]
    return sum(outside.values()), sum(sizes), max(blocks)
