"""What the components of a run store: shapes and dtypes, and the bytes of frozen weights as
the run keeps them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.graph import QuantizationMethod
from dstrain.models.execution import Kept, last_blocks, repeated_blocks
from dstrain.models.quantization.layers import storable_layers


@dataclass(frozen=True)
class PlannedTensor:
    """A parameter or buffer of a network."""

    layer: str
    """The dotted name of its layer, without what LoRA adds to it."""
    shape: tuple[int, ...]
    size: int
    """Its bytes as it is loaded."""
    is_storable: bool
    """Whether it is the weight of a linear layer, which a method may store."""
    is_parameter: bool
    is_trained: bool
    block: int
    """The number of the repeated block that it is in, from 0; -1 for none."""

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
    """Bytes of frozen weights on the device: of swapped blocks, those of the two largest."""
    ram: int
    """Bytes of the frozen weights of swapped blocks in RAM."""
    largest_stored: int
    """Numbers of the largest weight that is restored to compute with it."""
    is_offloaded: bool
    """Whether it is on the device only while a unit uses it."""
    is_stored: bool
    """Whether a method stores weights of it."""


def kept_weights(component: PlannedComponent, kept: Kept) -> KeptWeights:
    """Return where the frozen weights of a component are if they are kept so."""
    last = last_blocks(range(component.blocks), kept.swapped_blocks)
    device = largest_stored = 0
    swapped: dict[int, int] = {}
    sizes = []
    for one in component.tensors:
        method = _method_of(one, kept)
        size = one.size
        if method is not None:
            rows, columns = one.shape
            size = method.stored_bytes((rows, columns))
        sizes.append(size)
        if one.is_trained:
            continue
        if method is not None:
            largest_stored = max(largest_stored, one.numbers)
        if one.block in last:
            swapped[one.block] = swapped.get(one.block, 0) + size
        else:
            device += size
    device += sum(sorted(swapped.values())[-2:])
    return KeptWeights(
        words=kept.describe(),
        sizes=tuple(sizes),
        device=device,
        ram=sum(swapped.values()),
        largest_stored=largest_stored,
        is_offloaded=kept.offloaded,
        is_stored=bool(kept.methods),
    )


def _method_of(one: PlannedTensor, kept: Kept) -> QuantizationMethod | None:
    """Return the method that quantizes a weight; None where it stays as it is loaded."""
    entries = kept.methods_of(one.layer) if one.is_storable else []
    return entries[0].method if entries else None


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
    blocks = {
        block: number for number, block in enumerate(repeated_blocks(network).keys())
    }
    storable = set(storable_layers(network))
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    seen: set[str] = set()
    tensors = []
    for full_name, tensor in (*network.named_parameters(), *network.named_buffers()):
        # Tied weights are one only after loading.
        if tied.get(full_name, full_name) in seen:
            continue
        seen.add(tied.get(full_name, full_name))
        place, _, last = full_name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        is_trained = is_parameter and tensor.requires_grad
        owner = [block for block in blocks if full_name.startswith(f"{block}.")]
        tensors.append(
            PlannedTensor(
                layer=place.removesuffix(".base_layer"),
                shape=tuple(tensor.shape),
                size=tensor.nbytes,
                is_storable=place in storable and last == "weight" and not is_trained,
                is_parameter=is_parameter,
                is_trained=is_trained,
                block=blocks[owner[0]] if owner else -1,
            )
        )
    weights = (one.dtype for one in network.parameters() if one.is_floating_point())
    dtype = "bf16" if torch.bfloat16 in weights else "fp32"
    return PlannedComponent(name, dtype, tuple(tensors), has_lora)
