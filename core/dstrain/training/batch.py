"""One sample and one micro-batch, as a training step receives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.training.order import MicroBatch


@dataclass(frozen=True)
class Sample:
    """One sample's values: its inputs (unsplit), or what crossed (stage 2); `inputs`
    names the inputs present.
    """

    values: Mapping[str, Any]
    inputs: frozenset[str]


@dataclass(frozen=True)
class Batch:
    """What one forward computes: a micro-batch and its samples."""

    micro: MicroBatch
    samples: Sequence[Sample]


def moved(value: Any, device: torch.device) -> Any:
    """Move a value's tensors to a device; nothing is cast."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    return (
        {key: moved(item, device) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
