"""The bytes of a component's weights as a run keeps them, from its configuration."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from dstrain.graph.quantization import QuantizationMethod
from dstrain.models.execution.blocks import repeated_blocks
from dstrain.models.execution.kept import Kept, last_blocks, matches

TRAINED = 4
"""Bytes of a number that is trained: it is in fp32."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of a network."""

    layer: str
    """The dotted name of its layer, without what LoRA adds to it."""
    shape: tuple[int, ...]
    size: int
    """Its bytes as it is loaded."""
    is_linear: bool
    """Whether it is the weight of a linear layer."""
    is_parameter: bool
    is_trained: bool
    block: int
    """The number of the repeated block that it is in, from 0; -1 for none."""

    @property
    def numbers(self) -> int:
        """Return how many numbers it has."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ComponentSize:
    """What a component stores."""

    name: str
    dtype: str
    """What its weights are loaded as: 'bf16', also where only some are, or 'fp32'."""
    stored: tuple[Stored, ...]
    has_lora: bool = False
    unquantized: tuple[str, ...] = ()
    """Patterns of the whole names of layers that no method stores."""

    @property
    def parameters(self) -> int:
        """Return the numbers of the published network: not those that LoRA adds."""
        return sum(
            one.numbers
            for one in self.stored
            if one.is_parameter and not (self.has_lora and one.is_trained)
        )

    @property
    def trained(self) -> int:
        """Return how many numbers are trained."""
        return sum(one.numbers for one in self.stored if one.is_trained)

    @property
    def frozen_bytes(self) -> int:
        """Return the bytes of what is not trained."""
        return sum(one.size for one in self.stored if not one.is_trained)

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of what is trained."""
        return sum(one.size for one in self.stored if one.is_trained)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of a weights file of this trained component."""
        if self.has_lora:
            return self.trained_bytes
        return sum(one.size for one in self.stored if one.is_parameter)


@dataclass(frozen=True)
class Place:
    """Where the frozen weights of a component are."""

    device: int
    """Bytes on the device: of swapped blocks, those of the two largest."""
    ram: int
    """Bytes of swapped blocks in RAM."""
    largest_stored: int
    """Numbers of the largest weight that a method stores."""


def as_kept(size: ComponentSize, kept: Kept) -> Place:
    """Return where the frozen weights of a component are if they are kept so."""
    count = 1 + max((one.block for one in size.stored), default=-1)
    last = last_blocks(range(count), kept.swapped_blocks)
    device = largest_stored = 0
    swapped: dict[int, int] = {}
    for one in size.stored:
        if one.is_trained:
            continue
        stored_by = _method_of(one, kept, size.unquantized)
        bytes_ = one.size
        if stored_by is not None:
            rows, columns = one.shape
            bytes_ = stored_by.stored_bytes((rows, columns))
            largest_stored = max(largest_stored, one.numbers)
        if one.block in last:
            swapped[one.block] = swapped.get(one.block, 0) + bytes_
        else:
            device += bytes_
    device += sum(sorted(swapped.values())[-2:])
    return Place(device, sum(swapped.values()), largest_stored)


def _method_of(
    one: Stored, kept: Kept, unquantized: Collection[str]
) -> QuantizationMethod | None:
    """Return the method that stores a weight, as `methods_of_layers` decides it."""
    if not one.is_linear or any(fnmatchcase(one.layer, name) for name in unquantized):
        return None
    for entry in kept.methods:
        is_meant = not entry.only or matches(one.layer, entry.only)
        if is_meant and not matches(one.layer, entry.excluded):
            return entry.method
    return None


def component_size(
    name: str, network: nn.Module, has_lora: bool, unquantized: Collection[str] = ()
) -> ComponentSize:
    """Measure the network of a component, with what is trained in it; it may be on any
    device.

    Args:
        name: The component.
        network: Its network, its weights as they are loaded.
        has_lora: Whether LoRA is trained on it.
        unquantized: Patterns of layers that its record leaves as they are loaded.
    """
    blocks = {
        block: number for number, block in enumerate(repeated_blocks(network).keys())
    }
    linear = {
        key for key, layer in network.named_modules() if isinstance(layer, nn.Linear)
    }
    tied: Mapping[str, str] = getattr(network, "all_tied_weights_keys", {})
    seen: set[str] = set()
    stored = []
    for full_name, tensor in (*network.named_parameters(), *network.named_buffers()):
        # Tied weights are one only after loading.
        if tied.get(full_name, full_name) in seen:
            continue
        seen.add(tied.get(full_name, full_name))
        place, _, last = full_name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        is_trained = is_parameter and tensor.requires_grad
        owner = [block for block in blocks if full_name.startswith(f"{block}.")]
        stored.append(
            Stored(
                layer=place.removesuffix(".base_layer"),
                shape=tuple(tensor.shape),
                size=tensor.nbytes,
                is_linear=place in linear and last == "weight" and not is_trained,
                is_parameter=is_parameter,
                is_trained=is_trained,
                block=blocks[owner[0]] if owner else -1,
            )
        )
    weights = (one.dtype for one in network.parameters() if one.is_floating_point())
    kept = "bf16" if torch.bfloat16 in weights else "fp32"
    return ComponentSize(name, kept, tuple(stored), has_lora, tuple(unquantized))
