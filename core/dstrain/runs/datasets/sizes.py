"""Say at which sizes images and videos are loaded, how many batches each size makes, and
how much of them is cropped away.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dstrain.console import number_of
from dstrain.data import Cell, Dataset
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


@dataclass(frozen=True)
class LargestSample:
    """The largest sample of a dataset, as JSON data: stage 1 records it, so that a dry run
    need not look at each row again.
    """

    place: str
    """Its row in messages."""
    inputs: Mapping[str, Mapping[str, Any]]
    """Input -> its literal, or the kind, mode and shapes of its images or video, or the
    shapes of its tensors by name."""


def largest_sample(
    dataset: Dataset, name_row: Callable[[int], str]
) -> LargestSample | None:
    """Return the largest sample of a dataset, with the longest of its prompts; None if
    it has none.

    name_row: Names a row in messages.
    """
    index = 0
    largest = (-1, -1)
    longest: dict[str, Cell] = {}
    for number, cells in enumerate(dataset.rows):
        weight = _weight(cells)
        if weight > largest:
            index, largest = number, weight
        for name, cell in cells.items():
            if cell.kind == "text":
                before = longest.setdefault(name, cell)
                longest[name] = max(before, cell, key=lambda one: len(one.literal))
    if not dataset.rows:
        return None
    cells = {
        name: longest.get(name, cell) for name, cell in dataset.rows[index].items()
    }
    place = name_row(int(dataset.sample_ids[index, 0]))
    return LargestSample(place, {name: _outline(cell) for name, cell in cells.items()})


def _weight(cells: Mapping[str, Cell]) -> tuple[int, int]:
    """Return the pixels and the letters of a sample."""
    shapes = [shape for cell in cells.values() for shape in cell.shapes]
    pixels = sum(map(prod, shapes))
    return pixels, sum(len(str(cell.literal or "")) for cell in cells.values())


def _outline(cell: Cell) -> dict[str, Any]:
    """Return what of a cell decides the size of its value, as JSON data."""
    if not cell.files:
        return {"literal": cell.literal}
    mode = dict(cell.parameters).get("mode", "RGB")
    shapes = [list(shape) for shape in cell.shapes]
    if cell.kind == "tensors":
        names = [name for name, _ in dict(cell.parameters)["tensors"]]
        return {"tensors": dict(zip(names, shapes, strict=True))}
    return {"kind": cell.kind, "mode": mode, "shapes": shapes}
