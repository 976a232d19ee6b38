"""Choose the sample whose activations are counted: the largest that a run has, without
decoding it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.config.sizes import parse_resolutions
from dstrain.console import number_of
from dstrain.data import Cell, Dataset
from dstrain.errors import UsageError
from dstrain.graph import Column, Constant, Frames, Measured
from dstrain.graph.inputs import OneOf
from dstrain.runs.datasets.flags import most_frames
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingData
from dstrain.training import SKIPPED, Sample

LETTERS = 512
"""Letters of a prompt where no dataset tells."""
MOST_CACHED = 64
"""Most samples of a feature cache that are read to find the largest."""


@dataclass(frozen=True)
class ChosenSample:
    """A sample, and where it is from, in words."""

    sample: Sample
    origin: str


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
    among = "the samples" if whole else number_of(len(looked), "sample")
    return ChosenSample(sample, f"the largest of {among} of the feature cache")


def largest_sample(setup: Setup, dataset: Dataset) -> LargestSample | None:
    """Return the largest sample of a dataset, with the longest of its prompts; None if
    it has none.
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
    place = setup.name_row(int(dataset.sample_ids[index, 0]))
    return LargestSample(place, {name: _outline(cell) for name, cell in cells.items()})


def of_largest(setup: Setup, largest: LargestSample) -> ChosenSample:
    """Return a sample as large as the largest of a dataset."""
    inputs = frozenset(largest.inputs)
    used = setup.plan(inputs).used_inputs
    values = {
        name: _value(outline)
        for name, outline in largest.inputs.items()
        if name in used
    }
    origin = f"the largest sample, {largest.place}, with the longest prompt"
    return ChosenSample(Sample(values, inputs), origin)


def of_flags(setup: Setup) -> ChosenSample:
    """Return a sample of the size that the flags ask for; without --height and --width
    a square of --max_pixels, or of the largest --resolution.
    """
    config = setup.config
    sides = parse_resolutions(config.resolution)
    pixels = max(sides) ** 2 if sides else config.max_pixels
    inputs = setup.all_inputs()
    used = setup.plan(inputs).used_inputs
    shapes: dict[str, tuple[int, int, int]] = {}
    files: list[tuple[int, int, int]] = []
    values: dict[str, Any] = {}
    for name, source in setup.spec.inputs.items():
        if not isinstance(source, Column) or name not in inputs:
            continue
        side = isqrt(pixels) // (source.multiple or 1)
        side *= source.multiple or 1
        height, width = config.height or side, config.width or side
        shapes[name] = (most_frames(setup.config), height, width)
        if source.is_file:
            files.append(shapes[name])
        if name in used and source.kind == "tensors":
            what = f"is needed to plan memory: task {setup.task.name} reads {name!r}, whose size its files tell"
            raise UsageError("--dataset_base_path", what)
        if name in used and isinstance(source.check, OneOf):
            values[name] = source.check.choices[0]
        elif name in used:
            values[name] = _of_kind(source.kind, source.mode, shapes[name])
    axes = ("frames", "height", "width")
    for name, other in setup.spec.inputs.items():
        if isinstance(other, Measured) and other.of in shapes and name in used:
            values[name] = shapes[other.of][axes.index(other.axis)]
        if isinstance(other, Constant) and name in used:
            values[name] = other.value
    _, height, width = next(iter(files or shapes.values()), (0, 0, 0))
    size = f"{width} x {height}"
    if setup.spec.reads_videos:
        size += f", {most_frames(setup.config)} frames"
    origin = f"a sample of {size} with a prompt of {LETTERS} letters"
    return ChosenSample(Sample(values, inputs), origin)


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


def _value(outline: Mapping[str, Any]) -> Any:
    """Return a value as large as that of a cell with this outline, of nothing."""
    if "literal" in outline:
        return outline["literal"]
    if "tensors" in outline:
        return {
            name: torch.zeros(()).expand(shape)
            for name, shape in outline["tensors"].items()
        }
    kind, mode, shapes = outline["kind"], outline["mode"], outline["shapes"]
    if kind == "video":
        return _of_kind("video", mode, shapes[0])
    values = [_of_kind("image", mode, shape) for shape in shapes]
    return values if kind == "images" else values[0]


def _of_kind(kind: str, mode: str, shape: Sequence[int]) -> Any:
    frames, height, width = shape
    if kind == "video":
        # One number, seen as many.
        pixels = torch.zeros((), dtype=torch.uint8).expand(frames, height, width, 3)
        return Frames(pixels, 16.0)
    if kind in ("image", "images"):
        # A mask that is black may leave nothing to learn.
        image = Image.new(mode, (width, height), "white")
        return image if kind == "image" else [image]
    if kind in ("text", "texts"):
        text = "a" * LETTERS
        return text if kind == "text" else [text]
    return 1 if kind == "integer" else 1.0
