"""Cells: one input of one row, checked from its text and headers, loaded when needed."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from dstrain.console import shown
from dstrain.data.clips import frames_at_rate
from dstrain.data.faults import check_unchanged
from dstrain.data.images import (
    HALF_GREY,
    LOADER_VERSION,
    SCALED,
    ImageInfo,
    Resolution,
    Size,
    convert,
    cover,
    cut_off,
    fit,
    load_image,
)
from dstrain.data.table import RawValue, name_fault, text_fault
from dstrain.data.variants import PLAIN, View
from dstrain.data.videos import (
    LOADER_VERSION as VIDEO_LOADER_VERSION,
    Video,
    read_frames,
)
from dstrain.errors import StateError, UsageError
from dstrain.graph import Column, MaskColumn
from dstrain.graph.inputs import Axis
from dstrain.storage import Digests, hash_json, read_tensors
from dstrain.storage.hashing import FileMark

VIEW = "view"
"""Name of the parameter of cells whose images are not seen plainly."""
NOT_EMPTY = "not empty"
"""The parameter of a mask that is refused where it is 0 everywhere."""
MASK = "mask"
"""The parameter of a mask: of an input, where it says nothing if it is of one value, or for
the loss.
"""
TENSORS_VERSION = 1
"""Raised when what is read of a file of tensors becomes something else."""
TENSORS = "tensors"
"""The parameter of a file of tensors: their names and shapes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One input of one sample before decoding; small enough to send to a process."""

    kind: str
    """As in Column."""
    literal: Any = None
    """The value of an input that is not a file."""
    files: tuple[str, ...] = ()
    """Absolute paths."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """What decides how the files are loaded, as (name, value) pairs.

    'sizes' holds one (height, width) per image, or a single one for all 'frames' of a
    video, 'tensors' the (name, shape) of each of a file of tensors.
    """
    marks: tuple[FileMark, ...] = ()
    """The marks of the files when they were inspected."""
    folder: str = ""
    """The folder of which all files are frames, some of them `files`; '' for others."""
    own: Size | None = None
    """(height, width) of the file of a video, or of the first image."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return (frames, height, width) of a video, and of each image, which is one
        frame, as loaded; and the shape of each tensor of a file of these.
        """
        parameters = dict(self.parameters)
        if TENSORS in parameters:
            return tuple(shape for _, shape in parameters[TENSORS])
        frames = len(parameters["frames"]) if self.kind == "video" else 1
        return tuple((frames, *size) for size in parameters.get("sizes", ()))

    def measured(self, axis: Axis) -> int:
        """Return what `Measured` says of a video, or of the first image."""
        frames, *size = self.shapes[0]
        own = list(self.own or size)
        cut = cut_off(own, size, self.view) if axis.startswith("crop_") else []
        return [frames, *size, *own, *cut][get_args(Axis).index(axis)]

    @property
    def view(self) -> View:
        """Return how its images are seen."""
        return View(*dict(self.parameters).get(VIEW, PLAIN))

    def seen(self, view: View) -> "Cell":
        """Return the cell with its images seen in another way; a literal stays."""
        if not self.files or view == PLAIN:
            return self
        return replace(self, parameters=(*self.parameters, (VIEW, tuple(view))))


def load_cell(cell: Cell) -> Any:
    """Return the value of a cell: its literal, an image, a list of images, Frames, or a
    record of tensors.

    Raises UsageError for a damaged file, StateError for one that was changed.
    """
    if not cell.files:
        return cell.literal
    value = _load_files(cell)
    # After decoding, so that damage is named as such, with its row.
    for file, mark in zip(cell.files, cell.marks, strict=False):
        check_unchanged(file, mark)
    return value


def _load_files(cell: Cell) -> Any:
    parameters = dict(cell.parameters)
    if "frames" in parameters:
        return _load_clip(cell, parameters)
    if TENSORS in parameters:
        return _load_tensors(Path(cell.files[0]))
    images = [
        load_image(
            Path(file),
            parameters["mode"],
            size,
            view=cell.view,
            is_mask=MASK in parameters,
        )
        for file, size in zip(cell.files, parameters["sizes"], strict=True)
    ]
    if not parameters.get(MASK, True):
        for image, file in zip(images, cell.files, strict=True):
            _refuse_one_value(file, *mask_channel(image).getextrema())
    if NOT_EMPTY in parameters and not any(mask_channel(images[0]).getextrema()):
        raise UsageError(
            cell.files[0],
            "masks out the whole image as it is loaded: nothing is left to train",
            "leave out the row, or let what is masked out count with --unmasked_weight",
        )
    return images if cell.kind == "images" else images[0]


def _refuse_one_value(file: str, low: float, high: float) -> None:
    """Raise UsageError for a mask of which all is white, from half grey on, or nothing."""
    if (low >= HALF_GREY) == (high >= HALF_GREY):
        raise UsageError(
            file,
            f"is {'black' if high < HALF_GREY else 'white'} everywhere as it is loaded",
            "a mask says which part of the image is meant: mend it, or leave out the row",
        )


def is_scaled(value: Any) -> bool:
    """Return whether an input is a mask, or has one, that was of 0 and 1."""
    found = value if isinstance(value, list) else [value]
    # The notes of an image, or what `Frames` hold.
    notes = (getattr(one, "info", getattr(one, "__dict__", ())) for one in found)
    return any(SCALED in one for one in notes)


def _load_tensors(path: Path) -> Any:
    try:
        return read_tensors(path)[0]
    except StateError as error:
        # It is a file of the dataset as others are, and its row may be skipped.
        raise UsageError(error.where, error.what, *error.help_lines) from error


def _load_clip(cell: Cell, parameters: dict[str, Any]) -> Any:
    (size,) = parameters["sizes"]
    pixels = _frames_of(cell, parameters, size)
    is_scaled = False
    if MASK in parameters:
        file = cell.files[0]
        # Of a video file, these may be the noise of a dark part.
        is_images = parameters["source"] == "images"
        if is_images and pixels.max() <= 1:
            whole = _frames_of(cell, parameters, None)
            is_scaled = whole.max() == 1
            if is_scaled:
                white = (Image.fromarray(255 * one) for one in whole)
                pixels = np.stack(
                    [np.asarray(cover(one, size, cell.view)) for one in white]
                )
        if is_images and np.ptp(pixels, axis=3).max() >= HALF_GREY:
            raise UsageError(file, "is a mask in colours; save it in black and white")
        _refuse_one_value(file, pixels.min(), pixels.max())
    if cell.kind == "image":
        return convert(Image.fromarray(pixels[0]), parameters["mode"])
    # Late: a dataset is checked without torch, which is slow to import.
    from torch import from_numpy

    from dstrain.graph import Frames

    clip = Frames(from_numpy(pixels), parameters["fps"])
    if is_scaled:
        vars(clip)[SCALED] = True
    return clip


def _frames_of(cell: Cell, parameters: dict[str, Any], size: Size | None) -> Any:
    """Return the pixels of a clip; without a size those of the whole frames."""
    view = PLAIN if size is None else cell.view
    if parameters["source"] == "video":
        return read_frames(Path(cell.files[0]), parameters["frames"], size, view)
    images = (load_image(Path(file), "RGB", size, view=view) for file in cell.files)
    return np.stack([np.asarray(image) for image in images])


def loader_version(column: Column) -> int:
    """Return the version of what loads the files of a column."""
    if column.kind == "tensors":
        return TENSORS_VERSION
    return VIDEO_LOADER_VERSION if column.from_video else LOADER_VERSION


def read_literal(value: RawValue, column: Column) -> Cell | None:
    """Parse and check a cell that names no file; return None if it is absent.

    Raises ValueError that says what is wrong.
    """
    literal: Any
    if column.kind == "texts":
        literal = texts(value)
    elif not isinstance(value, str):
        raise ValueError(f"is a list, but one {column.kind} is expected")
    elif column.kind == "text":
        literal = value
    elif not value.strip():
        return None
    else:
        parse = _integer if column.kind == "integer" else _number
        literal = parse(value.strip())
    if column.check is not None and (fault := column.check(literal)):
        raise ValueError(fault)
    return Cell(column.kind, literal)


def image_cell(
    column: Column, resolution: Resolution, images: Sequence[ImageInfo]
) -> Cell:
    """Return the cell of image files; raise ValueError for an image that is too small."""
    files = tuple(image.path for image in images)
    sizes = tuple(fit(image.size, resolution, column.multiple) for image in images)
    parameters = (("loader", LOADER_VERSION), ("mode", column.mode), ("sizes", sizes))
    marks = tuple(image.mark for image in images)
    return Cell(column.kind, None, files, parameters, marks, "", images[0].size)


def mask_cell(
    column: Column, masks: Sequence[ImageInfo], own: Size, loaded: Size
) -> Cell:
    """Return the cell of masks, which are cropped as what they are of is.

    Args:
        own: (height, width) of the image or video itself.
        loaded: (height, width) at which that is loaded.

    Raises ValueError for a mask of another aspect ratio.
    """
    for mask in masks:
        check_mask_size(mask.path, mask.size, own)
    parameters: list[tuple[str, Any]] = [
        ("loader", LOADER_VERSION),
        ("mode", column.mode),
        ("sizes", (loaded,) * len(masks)),
    ]
    is_for_loss = isinstance(column, MaskColumn)
    if is_for_loss or column.mode == "L":
        parameters.append((MASK, is_for_loss))
    if isinstance(column, MaskColumn) and column.not_empty:
        parameters.append((NOT_EMPTY, True))
    files = tuple(mask.path for mask in masks)
    marks = tuple(mask.mark for mask in masks)
    return Cell(column.kind, None, files, tuple(parameters), marks)


def check_mask_size(path: str, size: Size, own: Size) -> None:
    """Raise ValueError for another aspect ratio than that of what it is of.

    own: (height, width) of the image or video itself.
    """
    height, width = size
    # That of the same ratio, whose sides were rounded to pixels, is at most this far off.
    if abs(height * own[1] - width * own[0]) > max(own):
        sizes = f"{height} x {width}, and what it is of {own[0]} x {own[1]} (height x width)"
        raise ValueError(
            f"{Path(path).name!r} is {sizes}; expected that size or its aspect ratio"
        )


def mask_channel(image: Image.Image) -> Image.Image:
    """Return the channel of a mask that says what counts: its only one, or the alpha."""
    return image.getchannel(image.getbands()[-1])


@dataclass(frozen=True)
class TensorsInfo:
    """A safetensors file, inspected by its header."""

    path: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """The name and shape of each tensor."""
    mark: FileMark
    """The file's mark when it was inspected."""


def tensors_cell(column: Column, found: TensorsInfo) -> Cell:
    """Return the cell of a file of tensors."""
    parameters = (("loader", TENSORS_VERSION), (TENSORS, found.shapes))
    return Cell(column.kind, None, (found.path,), parameters, (found.mark,))


@dataclass(frozen=True)
class ResampledVideo:
    """A video of a row, at its column's frame rate, before it is cut into clips."""

    column: Column
    video: Video
    size: Size
    """(height, width) as loaded."""
    frame_indices: tuple[int, ...]
    """The frames of the file that show the video at the column's frame rate."""

    @classmethod
    def of(
        cls,
        column: Column,
        resolution: Resolution,
        video: Video,
        size: Size | None = None,
    ) -> "ResampledVideo":
        """Resample a video; raise ValueError if its frames are too small.

        size: (height, width) at which it is loaded; None has that of the resolution.
        """
        if size is None:
            size = fit(video.size, resolution, column.multiple)
        indices = tuple(range(video.frames))
        if column.fps and video.fps:
            indices = frames_at_rate(video.timestamps, video.end, column.fps)
        return cls(column, video, size, indices)

    def cell(self, clip: range) -> Cell:
        """Return the cell of a clip, or of the one frame of it that the column selects."""
        column = self.column
        if column.frame == "first":
            clip = clip[:1]
        elif column.frame == "last":
            clip = clip[-1:]
        frames = tuple(self.frame_indices[index] for index in clip)
        files: tuple[str, ...] = (self.video.path,)
        marks = self.video.marks
        source = "video"
        folder = ""
        if self.video.files:
            # A folder of frames: the key holds only the files that the clip shows.
            files = tuple(self.video.files[frame] for frame in frames)
            marks = tuple(self.video.marks[frame] for frame in frames)
            frames = tuple(range(len(frames)))
            source = "images"
            if self.video.path not in self.video.files:
                folder = self.video.path
        parameters: list[tuple[str, Any]] = [
            ("loader", VIDEO_LOADER_VERSION),
            ("mode", column.mode),
            ("sizes", (self.size,)),
            ("source", source),
            ("frames", frames),
        ]
        if column.kind == "video":
            parameters.append(("fps", column.fps or self.video.fps))
            if column.mode == "L":
                parameters.append((MASK, False))
        own = self.video.size
        return Cell(column.kind, None, files, tuple(parameters), marks, folder, own)


def file_names(value: RawValue, column: Column) -> list[str]:
    """Return the file names in a cell, none if it is blank; raise ValueError."""
    if isinstance(value, str) and not value.strip():
        return []
    if column.kind != "images":
        if not isinstance(value, str):
            raise ValueError(f"is a list, but one {column.kind} is expected")
        names = [value]
    else:
        names = texts(value)
        if not all(name.strip() for name in names):
            raise ValueError("has a blank file name")
    for name in names:
        if fault := name_fault(name):
            raise ValueError(fault)
    return names


def texts(value: RawValue) -> list[str]:
    """Return the texts in a cell; raise ValueError.

    A list in csv is written as JSON. A single text is a list of one, a blank cell none.
    """
    if isinstance(value, list):
        return value
    text = value.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [value] if text else []
    try:
        found: list[str] = json.loads(value)
    except (ValueError, RecursionError) as error:
        what = f'is not a list of texts such as ["a.png", "b.png"]: {error}'
        raise ValueError(what) from error
    if not all(isinstance(text, str) for text in found):
        raise ValueError("has an entry that is not text")
    for entry in found:
        # An escape in JSON can spell what the file itself cannot contain.
        if fault := text_fault(entry):
            raise ValueError(fault)
    return found


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{shown(text)!r} is not an integer of at most 18 digits")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # float() also accepts 1_000, which is more likely a slip than a number.
    if not math.isfinite(number) or "_" in text:
        raise ValueError(f"{shown(text)!r} is not a finite number")
    return number


def input_key(cell: Cell, digests: Digests) -> str:
    """Return the key of an input: the hash of its value, or of its files' bytes and of
    how they are loaded.
    """
    if not cell.files:
        return hash_json("literal", [cell.kind, cell.literal])
    contents = [digests.of(file) for file in cell.files]
    return hash_json("files", [cell.kind, contents, cell.parameters])
