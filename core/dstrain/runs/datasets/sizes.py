"""Say at which sizes images and videos are loaded, how many batches each size makes, and
how much of them is cropped away.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dstrain.console import number_of
from dstrain.data import Dataset
from dstrain.data.dataset import Signature
from dstrain.graph import Column
from dstrain.training import Order

MOST_LINES = 30
"""Most sizes that are listed each by itself."""


class GroupSize(NamedTuple):
    """The samples of one signature; a plan of the feature cache records it."""

    size: str
    """Height and width of their largest image or video in words, '' without one."""
    samples: int
    cropped: float
    """Mean share of their images that is cut off, 0 to less than 1."""


def group_sizes(dataset: Dataset) -> list[GroupSize]:
    """Return the sizes of a dataset, one for each signature, in the order of these."""
    groups = dataset.groups[dataset.first_variants]
    counts = np.bincount(groups, minlength=len(dataset.signatures)).tolist()
    return [
        GroupSize(_size_of(common, dataset.columns), count, cropped)
        for common, count, cropped in zip(
            dataset.signatures, counts, dataset.cropped, strict=True
        )
    ]


def trained_sizes(order: Order, sizes: Iterable[GroupSize]) -> list[GroupSize]:
    """Return the sizes with the samples of an epoch of each, repeated ones as often as
    they are drawn.
    """
    counts = order.draws_of_groups.tolist()
    return [
        one._replace(samples=count) for one, count in zip(sizes, counts, strict=False)
    ]


def size_lines(sizes: Iterable[GroupSize], samples_per_step: int | None) -> list[str]:
    """Return a line for each size, and one for all; none if all samples are of one size
    and nothing is cropped away.

    samples_per_step: Samples of a batch, over all processes; None where nothing is
        trained.
    """
    by_size: dict[str, list[GroupSize]] = {}
    for one in sizes:
        if one.size and one.samples:
            by_size.setdefault(one.size, []).append(one)
    used = [one for group in by_size.values() for one in group]
    if len(by_size) < 2 and not any(one.cropped for one in used):
        return []

    def in_words(group: Sequence[GroupSize]) -> str:
        samples = sum(one.samples for one in group)
        found = number_of(samples, "sample")
        if samples_per_step is not None:
            batches = sum(math.ceil(one.samples / samples_per_step) for one in group)
            found += f", {number_of(batches, 'batch', 'batches')}"
        cropped = sum(one.samples * one.cropped for one in group)
        return f"{found}, {cropped / samples:.1%} cropped away"

    ordered = sorted(
        by_size.items(), key=lambda one: -sum(size.samples for size in one[1])
    )
    lines = [f"    {size}: {in_words(group)}" for size, group in ordered[:MOST_LINES]]
    if len(ordered) > MOST_LINES:
        others = number_of(len(ordered) - MOST_LINES, "other size")
        lines.append(f"    and {others}")
    head = f"{number_of(len(by_size), 'size')} (height x width)"
    if samples_per_step is not None:
        head += f", batches of up to {samples_per_step}"
    return [f"{head}:", *lines, f"    in all: {in_words(used)}"]


def _size_of(common: Signature, columns: Mapping[str, Column]) -> str:
    """Return the size of the largest image or video of a signature in words."""
    largest = (0, 0, 0)
    for name, shapes in common:
        column = columns.get(name)
        if column is not None and column.is_file and column.kind != "tensors":
            largest = max(largest, *shapes, key=math.prod)
    frames, height, width = largest
    if not height:
        return ""
    in_space = f"{height} x {width}"
    return f"{frames} frames of {in_space}" if frames > 1 else in_space
