"""Hold one sample and one micro-batch, as a training step receives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.training.order import MicroBatch


@dataclass(frozen=True)
class Sample:
    """One sample."""

    values: Mapping[str, Any]
    """Its inputs, or in stage 2 its cached values."""
    inputs: frozenset[str]
    """The names of the inputs that are present."""


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass."""

    micro_batch: MicroBatch
    samples: Sequence[Sample]


def to_device(value: Any, device: torch.device) -> Any:
    """Move a value's tensors to a device, without casting any."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
