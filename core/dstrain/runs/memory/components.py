"""The bytes of a component's weights as a run keeps them, from its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.graph import QuantizationMethod
from dstrain.models.execution import Kept, last_blocks, repeated_blocks
from dstrain.models.quantization.layers import storable_layers

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
class ComponentSize:
    """What a component stores."""

    name: str
    dtype: str
    """What its weights are loaded as: 'bf16', also where only some are, or 'fp32'."""
    stored: tuple[Stored, ...]
    has_lora: bool = False

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
    def is_mostly_linear(self) -> bool:
        """Return whether most of its bytes are weights that a method could store."""
        linear = sum(one.size for one in self.stored if one.is_storable)
        return 2 * linear > self.frozen_bytes

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
class FrozenBytes:
    """Where the frozen weights of a component are."""

    device: int
    """Bytes on the device: of swapped blocks, those of the two largest."""
    ram: int
    """Bytes of swapped blocks in RAM."""
    largest_stored: int
    """Numbers of the largest weight that a method quantizes."""


def as_kept(size: ComponentSize, kept: Kept) -> FrozenBytes:
    """Return where the frozen weights of a component are if they are kept so."""
    count = 1 + max((one.block for one in size.stored), default=-1)
    last = last_blocks(range(count), kept.swapped_blocks)
    device = largest_stored = 0
    swapped: dict[int, int] = {}
    for one in size.stored:
        if one.is_trained:
            continue
        bytes_ = _stored_bytes(one, kept)
        if _method_of(one, kept) is not None:
            largest_stored = max(largest_stored, one.numbers)
        if one.block in last:
            swapped[one.block] = swapped.get(one.block, 0) + bytes_
        else:
            device += bytes_
    device += sum(sorted(swapped.values())[-2:])
    return FrozenBytes(device, sum(swapped.values()), largest_stored)


@dataclass(frozen=True)
class DividedBytes:
    """What one process has of a network that is sharded among several."""

    frozen: int
    """Bytes of its rows of what is not trained, and of buffers."""
    trained: int
    """Bytes of its rows of what is trained."""
    numbers: int
    """How many numbers those are."""
    together: int
    """Bytes of whole weights on the device at the peak of a step: those of no block and
    of two blocks, or all."""


def as_divided(
    size: ComponentSize, kept: Kept, processes: int, gives_up: bool
) -> DividedBytes:
    """Return what a process has of a network, of those with the most.

    Args:
        size: The network.
        kept: How its linear layers are quantized.
        processes: How many it is sharded among.
        gives_up: Whether a block's weights are given up after its forward pass.
    """
    frozen = trained = numbers = 0
    whole: dict[int, int] = {}
    for one in size.stored:
        bytes_ = _stored_bytes(one, kept)
        if not one.is_parameter or not one.shape:
            frozen += bytes_
            continue
        rows = -(-one.shape[0] // processes)
        own = bytes_ * rows // one.shape[0]
        if one.is_trained:
            trained += own
            numbers += one.numbers * rows // one.shape[0]
        else:
            frozen += own
        whole[one.block] = whole.get(one.block, 0) + bytes_
    outside = whole.pop(-1, 0)
    blocks = sorted(whole.values())
    # One computes, and the next is put together meanwhile.
    together = outside + sum(blocks[-2:] if gives_up else blocks)
    return DividedBytes(frozen, trained, numbers, together)


def _stored_bytes(one: Stored, kept: Kept) -> int:
    """Return the bytes of a weight as a method quantizes it, if one does."""
    method = _method_of(one, kept)
    if method is None:
        return one.size
    rows, columns = one.shape
    return method.stored_bytes((rows, columns))


def _method_of(one: Stored, kept: Kept) -> QuantizationMethod | None:
    """Return the method that quantizes a weight; None where it stays as it is loaded."""
    entries = kept.methods_of(one.layer) if one.is_storable else []
    return entries[0].method if entries else None


def component_size(name: str, network: nn.Module, has_lora: bool) -> ComponentSize:
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
                is_storable=place in storable and last == "weight" and not is_trained,
                is_parameter=is_parameter,
                is_trained=is_trained,
                block=blocks[owner[0]] if owner else -1,
            )
        )
    weights = (one.dtype for one in network.parameters() if one.is_floating_point())
    kept = "bf16" if torch.bfloat16 in weights else "fp32"
    return ComponentSize(name, kept, tuple(stored), has_lora)
