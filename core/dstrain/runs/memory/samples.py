"""Choose the sample whose activations are counted: the largest that a run has, without
decoding it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.data.cells import Cell
from dstrain.data.dataset import Dataset
from dstrain.graph.inputs import Column, Constant, Measured
from dstrain.graph.values import Frames
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingData
from dstrain.training.batching import SKIPPED
from dstrain.training.loader import Sample

LETTERS = 512
"""Letters of a prompt where no dataset tells."""
MOST_CACHED = 64
"""Most samples of a feature cache that are read to find the largest."""


@dataclass(frozen=True)
class ChosenSample:
    """A sample, and where it is from, in words."""

    sample: Sample
    origin: str


def of_cache(data: TrainingData) -> ChosenSample:
    """Return the largest of the samples of a feature cache that are looked at: the
    first of each size, then others of the size of the largest.
    """
    source: Any = data.source
    present = np.flatnonzero(data.groups != SKIPPED)
    first = present[np.unique(data.groups[present], return_index=True)[1]]
    looked: dict[int, int] = {}

    def look(index: int) -> None:
        if len(looked) < MOST_CACHED:
            values = source.sample(*data.sample_ids[index].tolist()).values
            looked[index] = sum(
                one.nbytes for one in tree_leaves(values) if isinstance(one, Tensor)
            )

    for index in np.sort(first).tolist():
        look(index)
    largest = data.groups[max(looked, key=lambda index: looked[index])]
    for index in np.flatnonzero(data.groups == largest)[: 2 * MOST_CACHED].tolist():
        if index not in looked:
            look(index)
    index = max(looked, key=lambda one: looked[one])
    sample = source.sample(*data.sample_ids[index].tolist())
    whole = len(looked) == len(present)
    among = "the samples" if whole else f"{len(looked)} samples"
    return ChosenSample(sample, f"the largest of {among} of the feature cache")


def of_dataset(setup: Setup, dataset: Dataset) -> ChosenSample:
    """Return the largest sample of a dataset, with the longest of its prompts."""
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
    cells = dataset.rows[index]
    inputs = frozenset(cells)
    cells = {name: longest.get(name, cell) for name, cell in cells.items()}
    used = setup.plan(inputs).used_inputs
    values = {name: _value(cell) for name, cell in cells.items() if name in used}
    row = int(dataset.sample_ids[index, 0])
    origin = f"the largest sample, {setup.name_row(row)}, with the longest prompt"
    return ChosenSample(Sample(values, inputs), origin)


def of_flags(setup: Setup) -> ChosenSample:
    """Return a sample of the size that the flags ask for; without --height and --width
    a square of --max_pixels.
    """
    config = setup.config
    inputs = setup.all_inputs()
    used = setup.plan(inputs).used_inputs
    shapes: dict[str, tuple[int, int, int]] = {}
    values: dict[str, Any] = {}
    for name, source in setup.spec.inputs.items():
        if not isinstance(source, Column) or name not in inputs:
            continue
        side = isqrt(config.max_pixels) // (source.multiple or 1)
        side *= source.multiple or 1
        height, width = config.height or side, config.width or side
        shapes[name] = (config.num_frames, height, width)
        if name in used:
            values[name] = _of_kind(source.kind, source.mode, shapes[name])
    axes = ("frames", "height", "width")
    for name, other in setup.spec.inputs.items():
        if isinstance(other, Measured) and other.of in shapes and name in used:
            values[name] = shapes[other.of][axes.index(other.axis)]
        if isinstance(other, Constant) and name in used:
            values[name] = other.value
    _, height, width = next(iter(shapes.values()), (0, 0, 0))
    size = f"{width} x {height}"
    if setup.spec.reads_videos:
        size += f", {config.num_frames} frames"
    origin = f"a sample of {size} with a prompt of {LETTERS} letters"
    return ChosenSample(Sample(values, inputs), origin)


def _weight(cells: Mapping[str, Cell]) -> tuple[int, int]:
    """Return the pixels and the letters of a sample."""
    shapes = [shape for cell in cells.values() for shape in cell.shapes]
    pixels = sum(frames * height * width for frames, height, width in shapes)
    return pixels, sum(len(str(cell.literal or "")) for cell in cells.values())


def _value(cell: Cell) -> Any:
    """Return a value as large as the cell's, of nothing."""
    if not cell.files:
        return cell.literal
    mode = dict(cell.parameters).get("mode", "RGB")
    values = [_of_kind("image", mode, shape) for shape in cell.shapes]
    if cell.kind == "video":
        return _of_kind("video", mode, cell.shapes[0])
    return values if cell.kind == "images" else values[0]


def _of_kind(kind: str, mode: str, shape: tuple[int, int, int]) -> Any:
    frames, height, width = shape
    if kind == "video":
        # One number, seen as many.
        pixels = torch.zeros((), dtype=torch.uint8).expand(frames, height, width, 3)
        return Frames(pixels, 16.0)
    if kind in ("image", "images"):
        image = Image.new(mode, (width, height))
        return image if kind == "image" else [image]
    if kind in ("text", "texts"):
        text = "a" * LETTERS
        return text if kind == "text" else [text]
    return 1 if kind == "integer" else 1.0
