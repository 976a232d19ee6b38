"""Join the values of samples to those of a batch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


def _join(
    name: str,
    values: list[Any],
    padded: Mapping[str, int],
) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        # Values of the negative branch are named 'negative.NAME'.
        axis = padded.get(name.rpartition(".")[2])
        if axis is None:
            return torch.cat(values)
        # pad_sequence pads the first axis, and adds that of the batch itself.
        sequences = [value[0].movedim(axis - 1, 0) for value in values]
        padded_values = pad_sequence(sequences, batch_first=True)
        return padded_values.movedim(1, axis)
    if isinstance(first, dict):
        return collate(values, padded)
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        items = zip(*values, strict=True)
        return [_join(name, list(item), padded) for item in items]
    if any(value != first for value in values[1:]):
        what = "samples of one batch differ in it, or in its length"
        raise UsageError(f"batch, value {name}", what, "use --batch_size 1")
    return first
