"""Build a dataset and inference arguments from a variant's table of inputs alone."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image

from dstrain.data.output import write_video
from dstrain.errors import UsageError
from dstrain.graph import (
    Column,
    Constant,
    Frames,
    Measured,
    PipelineSpec,
    make_plan,
    with_measured,
)
from dstrain.graph.inputs import Axis, InferenceOnly, OneOf
from dstrain.pipeline import generate_task
from dstrain.training import SFT

CAPTIONS = ("a dog", "", "two dogs that run over a long bridge in the rain")
"""Texts of several lengths, one of them blank."""
NEGATIVE = "blurry, ugly"
LEAST_SIDE = 32
FPS = 8.0
CLIPS = 2
"""A video has twice the least number of frames beyond its first."""
STEPS = 3
"""Steps of an inference."""
LIST = 2
"""Entries of a list of texts or of images."""


@dataclass(frozen=True)
class Size:
    """The size of every image and video."""

    height: int
    width: int
    frames: int
    """Those of videos."""

    def __str__(self) -> str:
        return f"{self.height} x {self.width}, {self.frames} frames"

    @property
    def measured(self) -> dict[str, int]:
        """Return what `Measured` says of such an image or video, part of a larger one."""
        original = (self.height + 9, 2 * self.width)
        sizes = (self.frames, self.height, self.width, *original, 3, 7)
        return dict(zip(get_args(Axis), sizes, strict=True))


def usual_size(spec: PipelineSpec) -> Size:
    """Return the least multiples of what the inputs need: at least 32 x 48 pixels, and
    `CLIPS` steps of frames after the first.
    """
    multiple = lcm(16, _side_multiple(spec))
    height, width = (
        -(-least // multiple) * multiple for least in (LEAST_SIDE, LEAST_SIDE * 3 // 2)
    )
    return Size(height, width, 1 + CLIPS * _frame_multiple(spec))


def least_sizes(spec: PipelineSpec) -> list[Size]:
    """Return the least sizes that the columns allow: one, two and three times what the
    sides and the frames after the first are multiples of, where an encoder or decoder
    that counts otherwise is noticed; no fewer frames than a column that is not optional needs.
    """
    side = _side_multiple(spec)
    if side == 1:
        return [usual_size(spec)]
    step = _frame_multiple(spec)
    required = [one for one in _columns(spec).values() if not one.optional]
    least = max((column.least_frames for column in required), default=1)
    counts = ((1, 1, 0), (1, 2, 1), (2, 1, 2), (2, 3, 3))
    return [
        Size(side * rows, side * columns, max(least, 1 + step * steps))
        for rows, columns, steps in counts
    ]


def write_rows(spec: PipelineSpec, folder: Path) -> Path:
    """Write a dataset that has every column of a variant, and rows without the optional
    ones.

    It holds noise with captions of several lengths: three rows that have everything,
    then two without optional files and numbers if there are such columns. Equal
    pipeline specs write equal files.
    """
    folder.mkdir(parents=True)
    # Of inputs from one column, those that are not a frame picked from it say what it
    # holds.
    columns = {
        column.name: column
        for column in sorted(
            _columns(spec).values(), key=lambda column: not column.frame
        )
    }
    optional = _optional(spec)
    rows = []
    for i, caption in enumerate((*CAPTIONS, *CAPTIONS[1:]) if optional else CAPTIONS):
        absent = optional if i >= len(CAPTIONS) else frozenset()
        rows.append(
            {
                name: _cell(spec, column, i, caption, folder)
                for name, column in columns.items()
                if name not in absent
            }
        )
    (folder / "metadata.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


def inputs(spec: PipelineSpec, size: Size | None = None) -> dict[str, Any]:
    """Return a value for every input of a variant: columns, measures, constants and
    defaults.

    Of the inputs that only inference gives, it has the negative branch's and those with
    a default. Images and videos have the usual size unless one is given. Videos of one
    frame come without optional columns: a first frame that is held leaves nothing.
    """
    size = size or usual_size(spec)
    is_still = spec.reads_videos and size.frames == 1
    given: dict[str, Any] = {}
    for name, source in spec.inputs.items():
        if name in spec.cfg_inputs.values():
            given[name] = NEGATIVE
        elif isinstance(source, Column):
            if not (is_still and source.optional):
                given[name] = _value(size, source)
        elif isinstance(source, Measured):
            given[name] = size.measured[source.axis]
        elif isinstance(source, Constant):
            given[name] = source.value
        elif name in spec.defaults:
            given[name] = spec.defaults[name]
    return given


def arguments(
    spec: PipelineSpec, guided: bool, size: Size | None = None
) -> dict[str, Any]:
    """Return arguments of a short inference: every input it uses, three steps, and the
    negative branch if `guided`; of the usual size unless one is given.
    """
    given = inputs(spec, size)
    if not guided:
        given |= dict.fromkeys(spec.cfg_inputs.values())
    present = frozenset(name for name, value in given.items() if value is not None)
    used = make_plan(spec, present, generate_task(spec, guided)).used_inputs
    wanted = {
        name: value for name, value in given.items() if name in used or value is None
    }
    return {
        **wanted,
        "num_inference_steps": STEPS,
        "guidance_scale": 4.0 if guided else spec.no_guidance,
        "seed": 5,
    }


def data_inputs(spec: PipelineSpec) -> frozenset[str]:
    """Return the inputs that a dataset gives: all but those of inference alone and of
    the negative branch.
    """
    negatives = set(spec.cfg_inputs.values())
    given = (
        name
        for name, source in spec.inputs.items()
        if not isinstance(source, InferenceOnly) and name not in negatives
    )
    return frozenset(given)


def _side_multiple(spec: PipelineSpec) -> int:
    return lcm(*(column.multiple or 1 for column in _sized_columns(spec)))


def _frame_multiple(spec: PipelineSpec) -> int:
    return lcm(*(column.frame_multiple or 1 for column in _sized_columns(spec)))


def _sized_columns(spec: PipelineSpec) -> list[Column]:
    """Return the columns that decide sizes: a frame of a loaded video has the video's."""
    columns = _columns(spec).values()
    videos = {column.name for column in columns if column.kind == "video"}
    return [
        column for column in columns if not (column.frame and column.name in videos)
    ]


def _columns(spec: PipelineSpec) -> dict[str, Column]:
    return {
        name: source
        for name, source in spec.inputs.items()
        if isinstance(source, Column)
    }


def _optional(spec: PipelineSpec) -> frozenset[str]:
    """Return the columns of files and numbers that a row may lack all together, and still
    train every component.
    """
    absent: set[str] = set()
    for name in dict.fromkeys(
        column.name
        for column in _columns(spec).values()
        if column.is_file or column.kind in ("integer", "number")
    ):
        if _trains(spec, absent | {name}):
            absent.add(name)
    return frozenset(absent)


def _trains(spec: PipelineSpec, absent: Collection[str]) -> bool:
    gone = [name for name, column in _columns(spec).items() if column.name in absent]
    given = data_inputs(spec)
    try:
        plan = make_plan(spec, given - with_measured(gone, spec.inputs), SFT)
    except UsageError:
        return False
    return plan.components == make_plan(spec, given, SFT).components


def _cell(
    spec: PipelineSpec, column: Column, row: int, caption: str, folder: Path
) -> Any:
    """Return a cell of metadata.json; files are written beside it."""
    size = usual_size(spec)
    value = _value(size, column, row, caption)
    files = folder / column.name
    if column.kind == "images":
        files.mkdir(exist_ok=True)
        names = [f"{column.name}/{row}-{i}.png" for i in range(len(value))]
        for name, image in zip(names, value, strict=True):
            image.save(folder / name)
        return names
    if isinstance(value, Image.Image) and not (column.frame or column.kind == "video"):
        files.mkdir(exist_ok=True)
        value.save(files / f"{row}.png")
        return f"{column.name}/{row}.png"
    if column.is_file:
        files.mkdir(exist_ok=True)
        write_video(_video(size, column, row), files / f"{row}.mp4")
        return f"{column.name}/{row}.mp4"
    return value


def _value(size: Size, column: Column, row: int = 0, caption: str = CAPTIONS[0]) -> Any:
    """Return the value of an input in one row, as a unit receives it."""
    if isinstance(column.check, OneOf):
        return column.check.choices[row % len(column.check.choices)]
    if column.kind == "text":
        return caption
    if column.kind == "texts":
        return [f"{caption} {i}" for i in range(LIST)]
    if column.kind == "integer":
        return 1
    if column.kind == "number":
        return 0.5
    if column.kind == "images":
        return [_image(size, column, LIST * row + i) for i in range(LIST)]
    return (
        _video(size, column, row)
        if column.kind == "video"
        else _image(size, column, row)
    )


def _image(size: Size, column: Column, seed: int) -> Image.Image:
    bands = {"RGB": 3, "RGBA": 4, "L": 1}[column.mode]
    pixels = _noise((size.height, size.width, bands), seed)
    return Image.fromarray(pixels if bands > 1 else pixels[..., 0])


def _video(size: Size, column: Column, seed: int) -> Frames:
    return Frames(
        torch.from_numpy(_noise((size.frames, size.height, size.width, 3), seed)),
        column.fps or FPS,
    )


def _noise(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
