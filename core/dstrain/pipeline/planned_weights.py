"""Measure the weights of components, and where they are if they are kept as a run asks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.graph.keeper import WeightSize
from dstrain.graph.keepers import Keepers
from dstrain.models.execution import repeated_blocks
from dstrain.models.placing import tied_names


@dataclass(frozen=True)
class PlannedTensor(WeightSize):
    """A parameter or buffer of a network, with its bytes as it is loaded; its layer is named
    without what LoRA adds to it.
    """

    is_parameter: bool
    is_trained: bool

    @property
    def numbers(self) -> int:
        """Return how many numbers it has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PlannedComponent:
    """What a component stores."""

    name: str
    dtype: str
    """What its weights are loaded as: 'bf16', also where only some are, or 'fp32'."""
    tensors: tuple[PlannedTensor, ...]
    has_lora: bool = False

    @property
    def blocks(self) -> int:
        """Return how many repeated blocks it has."""
        return 1 + max((one.block for one in self.tensors), default=-1)

    @property
    def parameters(self) -> int:
        """Return the numbers of the published network: not those that LoRA adds."""
        return sum(
            one.numbers
            for one in self.tensors
            if one.is_parameter and not (self.has_lora and one.is_trained)
        )

    @property
    def trained(self) -> int:
        """Return how many numbers are trained."""
        return sum(one.numbers for one in self.tensors if one.is_trained)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of what is not trained."""
        return sum(one.size for one in self.tensors if not one.is_trained)

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of what is trained."""
        return sum(one.size for one in self.tensors if one.is_trained)


@dataclass(frozen=True)
class KeptWeights:
    """How a run keeps the weights of a component."""

    words: str
    """'' where they are as they are loaded."""
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    device: int
    """Bytes of frozen weights on the device, at the most."""
    ram: int
    """Bytes of frozen weights that wait in RAM while the component is used."""
    largest_stored: int
    """Numbers of the largest weight that is restored to compute with it."""
    is_offloaded: bool
    """Whether it is on the device only while a unit uses it."""
    is_stored: bool
    """Whether a method stores weights of it."""


def kept_weights(component: PlannedComponent, keepers: Keepers) -> KeptWeights:
    """Return where the frozen weights of a component are if they are kept so."""
    name = component.name
    sizes = [keepers.size(name, one) for one in component.tensors]
    frozen = [one for one in component.tensors if not one.is_trained]
    stored = [one.numbers for one in frozen if keepers.size(name, one) != one.size]
    place = keepers.bytes(name, frozen)
    return KeptWeights(
        words=keepers.describe(name),
        sizes=tuple(sizes),
        device=place.device + place.used,
        ram=place.ram - place.used,
        largest_stored=max(stored, default=0),
        is_offloaded=place.used > 0,
        is_stored=any(one.kind == "quantize" for one in keepers.of(name)),
    )


def planned_component(
    name: str, network: nn.Module, has_lora: bool
) -> PlannedComponent:
    """Measure the network of a component, with what is trained in it; it may be on any
    device.

    Args:
        name: The component.
        network: Its network, its weights as they are loaded.
        has_lora: Whether LoRA is trained on it.
    """
    blocks = {block: i for i, block in enumerate(repeated_blocks(network))}
    shared = tied_names(network)
    linear = {
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" not in shared
    }
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    seen: set[str] = set()
    tensors = []
    for full_name, tensor in (*network.named_parameters(), *network.named_buffers()):
        # Tied weights are one only after loading.
        if tied.get(full_name, full_name) in seen:
            continue
        seen.add(tied.get(full_name, full_name))
        place, _, last = full_name.rpartition(".")
        is_trained = tensor.requires_grad
        owner = [block for block in blocks if full_name.startswith(f"{block}.")]
        tensors.append(
            PlannedTensor(
                layer=place.removesuffix(".base_layer"),
                shape=tuple(tensor.shape),
                size=tensor.nbytes,
                is_linear=place in linear and last == "weight" and not is_trained,
                is_parameter=isinstance(tensor, nn.Parameter),
                is_trained=is_trained,
                block=blocks[owner[0]] if owner else -1,
            )
        )
    weights = (one.dtype for one in network.parameters())
    dtype = "bf16" if torch.bfloat16 in weights else "fp32"
    return PlannedComponent(name, dtype, tuple(tensors), has_lora)
