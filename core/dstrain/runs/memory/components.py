"""The bytes of a component's weights as a run keeps them, from its configuration."""

from dataclasses import dataclass

import torch
from torch import nn

from dstrain.models.blocks import repeated_blocks

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


def component_size(name: str, network: nn.Module, has_lora: bool) -> ComponentSize:
    """Measure the network of a component, with what is trained in it; it may be on any
    device.
    """
    blocks = {
        block: number for number, block in enumerate(repeated_blocks(network).keys())
    }
    linear = {
        key for key, layer in network.named_modules() if isinstance(layer, nn.Linear)
    }
    stored = []
    for full_name, tensor in (*network.named_parameters(), *network.named_buffers()):
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
    return ComponentSize(name, kept, tuple(stored), has_lora)
