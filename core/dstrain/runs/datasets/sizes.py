"""Say at which sizes images and videos are loaded, how many batches each size makes, and
how much of them is cropped away.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dstrain.console import number_of
from dstrain.data import Dataset
from dstrain.data.dataset import Signature
from dstrain.graph import Column
from dstrain.training import Order

MOST_LINES = 30
"""Most sizes that are listed each by itself."""
"""A size in words."""


class GroupSize(NamedTuple):
    """The samples of one signature; a plan of the feature cache records it."""

    size: str
    """Height and width of their largest image or video in words, '' without one."""
    samples: int
    cropped: float
    """Mean share of their images that is cut off, 0 to less than 1."""


@dataclass
class _Total:
    samples: int = 0
    batches: int = 0
    cropped: float = 0.0

    def add(self, samples: int, batches: int, cropped: float) -> None:
        self.samples += samples
        self.batches += batches
        self.cropped += samples * cropped

    def in_words(self, with_batches: bool) -> str:
        batches = (
            f", {number_of(self.batches, 'batch', 'batches')}" if with_batches else ""
        )
        share = self.cropped / self.samples if self.samples else 0.0
        return f"{number_of(self.samples, 'sample')}{batches}, {share:.1%} cropped away"


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

    Args:
        sizes: The sizes of the samples that are used.
        samples_per_step: Samples of a batch, over all processes; None where nothing is
            trained.
    """
    by_size: dict[str, _Total] = {}
    total = _Total()
    for size, samples, cropped in sizes:
        batches = math.ceil(samples / samples_per_step) if samples_per_step else 0
        if size and samples:
            by_size.setdefault(size, _Total()).add(samples, batches, cropped)
            total.add(samples, batches, cropped)
    if len(by_size) < 2 and not total.cropped:
        return []
    ordered = sorted(by_size.items(), key=lambda one: -one[1].samples)
    with_batches = samples_per_step is not None
    lines = [
        f"    {size}: {own.in_words(with_batches)}"
        for size, own in ordered[:MOST_LINES]
    ]
    if len(ordered) > MOST_LINES:
        others = number_of(len(ordered) - MOST_LINES, "other size")
        lines.append(f"    and {others}")
    each = f" of up to {samples_per_step}" if with_batches else ""
    head = f"{number_of(len(by_size), 'size')} (height x width)"
    if each:
        head += f", batches{each}"
    return [f"{head}:", *lines, f"    in all: {total.in_words(with_batches)}"]


def _size_of(common: Signature, columns: Mapping[str, Column]) -> str:
    """Return the size of the largest image or video of a signature in words."""
    largest = (0, 0, 0)
    for name, shapes in common:
        column = columns.get(name)
        if column is not None and column.is_file and column.kind != "tensors":
            largest = max(largest, *_shapes(shapes), key=math.prod)
    frames, height, width = largest
    if not height:
        return ""
    in_space = f"{height} x {width}"
    return f"{frames} frames of {in_space}" if frames > 1 else in_space


def _shapes(shapes: Sequence[Any]) -> Collection[tuple[int, int, int]]:
    return [(int(frames), int(height), int(width)) for frames, height, width in shapes]
