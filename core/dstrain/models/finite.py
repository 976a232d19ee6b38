"""Find values and weights that are not finite."""

from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn


def is_finite(value: Any) -> bool:
    """Return whether all tensors in a value, which may be a list or record, are finite."""
    found: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(bool(torch.isfinite(tensor).all()))
        return tensor

    recursively_apply(note, value)
    return all(found)


def damaged_weight(module: nn.Module) -> str:
    """Return the name of a weight with NaN or infinity; '' without any."""
    for name, weight in module.state_dict().items():
        if isinstance(weight, Tensor) and not torch.isfinite(weight).all():
            return name
    return ""
