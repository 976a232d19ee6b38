"""Put weights into a network, one after the other."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Place = Callable[[nn.Module, str, Tensor], Tensor]
"""(network, name of one of its weights, that weight on the CPU) -> the parameter or
buffer to keep in the network, on its device.

It is called for each weight as it is read, before the next one is: what it does not keep
is freed. It may also replace the layer that the weight belongs to.
"""


class OwnRows(Protocol):
    """The rows of a network's weights that a process has."""

    def keep_rows(self, network: nn.Module, name: str, stored: Tensor) -> Tensor:
        """Return what is put in the network for a weight."""


def keep(network: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Place a weight on the CPU, as it was read."""
    return weight


def place_weights(network: nn.Module, place: Place) -> None:
    """Place the weights of a network that were not placed as they were read."""
    placed: dict[int, Tensor] = {}
    for name, weight in network.state_dict(keep_vars=True).items():
        if id(weight) not in placed:
            put(network, name, place(network, name, weight.detach()))
            own = network.get_submodule(name.rpartition(".")[0])
            placed[id(weight)] = getattr(own, name.rpartition(".")[2])
        else:
            put(network, name, placed[id(weight)])


def put(network: nn.Module, name: str, weight: Tensor) -> None:
    """Make a tensor the parameter or the saved buffer of this name, frozen.

    Raises AttributeError if the network has none.
    """
    parent, _, own = name.rpartition(".")
    module = network.get_submodule(parent)
    if own in module._buffers:
        module._buffers[own] = weight
        return
    if own not in module._parameters:
        raise AttributeError(f"{type(network).__name__} has no weight {name}")
    if not isinstance(weight, nn.Parameter):
        weight = nn.Parameter(weight, requires_grad=False)
    module._parameters[own] = weight


def tied_names(network: nn.Module) -> frozenset[str]:
    """Return the weights that a network of transformers declares tied, all of them."""
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    return frozenset((*tied, *tied.values()))


def place_buffers(network: nn.Module, device: torch.device) -> None:
    """Move the buffers that no file has, which the constructor computed, to a device."""
    for module in network.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def set_dtype(network: nn.Module, dtype: torch.dtype) -> None:
    """Give the weights of a network without memory the dtype that loading gives them."""
    dtype = getattr(network, "weights_dtype", dtype)
    for weight in network.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
