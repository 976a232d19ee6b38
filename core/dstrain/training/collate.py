"""Samples to a batch: tensors are joined along their first axis, padded with zeros
where the family says so.
"""

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
    """Join values of equal names; `padded` names the axis that is padded to the longest
    of this batch.

    Every tensor has a first axis of 1 per sample. A value named in `listed` becomes the
    list of what each sample has. Other values must be equal in all samples, else
    UsageError.
    """
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {
        name: values if name in listed else _join(name, values, padded)
        for name, values in columns.items()
    }


def _join(name: str, values: list[Any], padded: Mapping[str, int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        axis = padded.get(name.rpartition(".")[2])
        return torch.cat(values if axis is None else _pad(values, axis))
    if isinstance(first, list):
        if len({len(value) for value in values}) > 1:
            lengths = ", ".join(str(len(value)) for value in values)
            raise UsageError(
                f"batch, value {name}",
                f"lists of one batch have lengths {lengths}",
                "use --batch_size 1",
            )
        return [
            _join(name, [value[i] for value in values], padded)
            for i in range(len(first))
        ]
    if isinstance(first, dict):
        return {
            key: _join(key, [value[key] for value in values], padded) for key in first
        }
    if any(value != first for value in values[1:]):
        raise UsageError(
            f"batch, value {name}",
            f"samples of one batch differ ({first!r} and others)",
            "use --batch_size 1",
        )
    return first


def _pad(values: Sequence[Tensor], axis: int) -> list[Tensor]:
    longest = max(value.shape[axis] for value in values)
    return [
        value
        if value.shape[axis] == longest
        else F.pad(
            value, [0, 0] * (value.ndim - axis - 1) + [0, longest - value.shape[axis]]
        )
        for value in values
    ]
