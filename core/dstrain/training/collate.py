"""Join the values of samples to those of a batch."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dstrain.errors import UsageError
from dstrain.graph import Frames


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
        padded: Value name -> axis padded with zeros to the longest of this batch.
        listed: Names of values that become a list of what each sample has.
    """
    batch: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        batch[name] = values if name in listed else _join(name, values, padded)
    return batch


def _join(name: str, values: list[Any], padded: Mapping[str, int]) -> Any:
    first = values[0]
    others = values[1:]
    if any(type(value) is not type(first) for value in others):
        raise _different(name, values)
    if isinstance(first, Tensor):
        # Values of the negative branch are named 'negative.NAME', those of a record
        # 'RECORD/NAME'.
        axis = padded.get(re.split("[./]", name)[-1])
        return _join_tensors(name, values, axis)
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in others):
            raise _different(name, values)
        return {
            key: _join(f"{name}/{key}", [value[key] for value in values], padded)
            for key in first
        }
    if isinstance(first, list):
        if any(len(value) != len(first) for value in others):
            raise _different(name, values)
        items = zip(*values, strict=True)
        return [_join(name, list(item), padded) for item in items]
    if not all(_equal(first, value) for value in others):
        raise _different(name, values)
    return first


def _join_tensors(name: str, values: list[Tensor], axis: int | None) -> Tensor:
    first = values[0]
    is_joined = not first.ndim or (axis in (None, 1) and first.is_contiguous())
    if len(values) == 1 and is_joined:
        # Joined with no other, it would be a copy that lies in memory as it does.
        return first
    for value in values if len(values) > 1 else []:
        shape = list(value.shape)
        expected = list(first.shape)
        if axis is not None and axis < min(len(shape), len(expected)):
            shape[axis] = expected[axis]
        if value.dtype != first.dtype or shape != expected or shape[:1] != [1]:
            raise _different(name, values)
    if axis is None or axis >= first.ndim:
        return torch.cat(values)
    # pad_sequence pads the first axis, and adds that of the batch itself.
    sequences = [value[0].movedim(axis - 1, 0) for value in values]
    return pad_sequence(sequences, batch_first=True).movedim(1, axis)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Frames):
        return one.fps == other.fps and torch.equal(one.pixels, other.pixels)
    return bool(one == other)


def _different(name: str, values: list[Any]) -> UsageError:
    """Return the error of values that cannot be joined; it shows what each sample has."""
    return UsageError(
        f"batch, value {name}",
        f"samples of one batch differ in it: {'; '.join(map(_shown, values))}",
        "use --batch_size 1",
        "or let its unit return tensors of one dtype whose first axis is 1 per sample",
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)[:40]
    size = f" of {len(value)}" if isinstance(value, list | dict) else ""
    return type(value).__name__ + size
