"""Join the values of samples to those of a batch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dstrain.errors import UsageError


def collate(
    samples: Sequence[Mapping[str, Any]],
    padded: Mapping[str, int],
    listed: Collection[str] = (),
) -> dict[str, Any]:
    """Join values of equal names; tensors, whose first axis is 1 per sample, along that
    axis.

    Raises UsageError for values that cannot be joined and are not equal in all samples.

    Args:
        samples: The values of each sample.
        padded: Value name -> the axis that is padded with zeros to the longest of this
            batch.
        listed: Names of values that become a list of what each sample has.
    """
    batch: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        batch[name] = values if name in listed else _join(name, values, padded)
    return batch


def _join(name: str, values: list[Any], padded: Mapping[str, int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        # Values of the negative branch are named 'negative.NAME'.
        axis = padded.get(name.rpartition(".")[2])
        return torch.cat(values if axis is None else _pad(values, axis))
    if isinstance(first, dict):
        return {
            key: _join(key, [value[key] for value in values], padded) for key in first
        }
    if isinstance(first, list):
        lengths = [len(value) for value in values]
        if len(set(lengths)) > 1:
            what = f"lists of one batch have lengths {', '.join(map(str, lengths))}"
            raise UsageError(f"batch, value {name}", what, "use --batch_size 1")
        items = zip(*values, strict=True)
        return [_join(name, list(item), padded) for item in items]
    if any(value != first for value in values[1:]):
        what = f"samples of one batch differ ({first!r} and others)"
        raise UsageError(f"batch, value {name}", what, "use --batch_size 1")
    return first


def _pad(values: Sequence[Tensor], axis: int) -> list[Tensor]:
    longest = max(value.shape[axis] for value in values)
    padded = []
    for value in values:
        missing = longest - value.shape[axis]
        # F.pad counts axes from the last; each has a width before and one after.
        widths = [0, 0] * (value.ndim - axis - 1) + [0, missing]
        padded.append(F.pad(value, widths) if missing else value)
    return padded
