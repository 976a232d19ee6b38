"""Choose the sample whose activations are counted: the largest that a run has, without
decoding it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from dstrain import Frames, Sample
from dstrain.plugin import (
    CachedRows,
    Column,
    Constant,
    LargestSample,
    Measured,
    PlannedRun,
    UsageError,
)
from dstrain.plugin.commands import number_of
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

LETTERS = 512
"""Letters of a prompt where no dataset tells."""
MOST_CACHED = 64
"""Most samples of a feature cache that are read to find the largest."""


@dataclass(frozen=True)
class ChosenSample:
    """A sample, and where it is from, in words."""

    sample: Sample
    origin: str


def of_cache(samples: CachedRows) -> ChosenSample:
    """Return the largest of the samples of a feature cache that are looked at: the
    first of each shape, then others of the shape of the largest.
    """
    looked: dict[int, int] = {}

    def look(index: int) -> None:
        if len(looked) < MOST_CACHED and index not in looked:
            looked[index] = sum(
                one.nbytes
                for one in tree_leaves(samples.sample(index).values)
                if isinstance(one, Tensor)
            )

    shapes = samples.shapes
    for index in np.sort(np.unique(shapes, return_index=True)[1]).tolist():
        look(index)
    largest = shapes[max(looked, key=lambda index: looked[index])]
    for index in np.flatnonzero(shapes == largest)[: 2 * MOST_CACHED].tolist():
        look(index)
    index = max(looked, key=lambda one: looked[one])
    whole = len(looked) == len(shapes)
    among = "the samples" if whole else number_of(len(looked), "sample")
    origin = f"the largest of {among} of the feature cache"
    return ChosenSample(samples.sample(index), origin)


def of_largest(run: PlannedRun, largest: LargestSample) -> ChosenSample:
    """Return a sample as large as the largest of a dataset."""
    inputs = frozenset(largest.inputs)
    used = run.setup.plan(inputs).used_inputs
    values = {
        name: _value(outline)
        for name, outline in largest.inputs.items()
        if name in used
    }
    origin = f"the largest sample, {largest.place}, with the longest prompt"
    return ChosenSample(Sample(values, inputs), origin)


def of_flags(run: PlannedRun) -> ChosenSample:
    """Return a sample of the size that the flags ask for; without --height and --width
    a square of --max_pixels, or of the largest --resolution.
    """
    setup, config = run.setup, run.config
    pixels = run.most_pixels
    inputs = setup.all_inputs()
    used = setup.plan(inputs).used_inputs
    shapes: dict[str, tuple[int, int, int]] = {}
    files: list[tuple[int, int, int]] = []
    values: dict[str, Any] = {}
    for name, source in setup.spec.inputs.items():
        if not isinstance(source, Column) or name not in inputs:
            continue
        multiple = source.multiple or 1
        side = isqrt(pixels) // multiple * multiple
        height, width = config.height or side, config.width or side
        shapes[name] = (run.most_frames, height, width)
        if source.is_file:
            files.append(shapes[name])
        if name in used and source.kind == "tensors":
            what = f"is needed to plan memory: task {setup.task.name} reads {name!r}, whose size its files tell"
            raise UsageError("--dataset_base_path", what)
        choices = getattr(source.check, "choices", ())
        if name in used and choices:
            values[name] = choices[0]
        elif name in used:
            values[name] = _of_kind(source.kind, source.mode, shapes[name])
    axes = "frames", "height", "width"
    for name in used:
        other = setup.spec.inputs[name]
        if isinstance(other, Measured) and other.of in shapes:
            sizes = zip(axes, shapes[other.of], strict=True)
            values[name] = dict(sizes).get(other.axis, 0)
        if isinstance(other, Constant):
            values[name] = other.value
    _, height, width = next(iter(files or shapes.values()), (0, 0, 0))
    size = f"{width} x {height}"
    if setup.spec.reads_videos:
        size += f", {run.most_frames} frames"
    origin = f"a sample of {size} with a prompt of {LETTERS} letters"
    return ChosenSample(Sample(values, inputs), origin)


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
