"""Find values that are no numbers, and weights that are not finite."""

from typing import Any

from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn


def has_nan(value: Any) -> bool:
    """Return whether a tensor in a value, which may be a list or record, contains NaN.

    Infinity is a number that masks of attention have.
    """
    found: list[bool] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(bool(_comparable(tensor).isnan().any()))
        return tensor

    recursively_apply(note, value)
    return any(found)


def damaged_weight(module: nn.Module) -> str:
    """Return the name of a weight with NaN or infinity; '' without any."""
    # Scales of stored weights are buffers that no state dict has.
    for name, weight in (*module.state_dict().items(), *module.named_buffers()):
        if isinstance(weight, Tensor) and not _comparable(weight).isfinite().all():
            return name
    return ""


def _comparable(tensor: Tensor) -> Tensor:
    # torch does not compare numbers of 8 bits.
    is_small = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.float() if is_small else tensor
