"""Choose the largest sample of a dataset, without decoding it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dstrain.data import Cell, Dataset


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
