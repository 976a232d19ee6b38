"""Cells: one input of one row, read from what is written in the metadata and loaded
when it is needed.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from dstrain.console import shown
from dstrain.data.clips import frames_at_rate
from dstrain.data.images import LOADER_VERSION, Resolution, convert, fit, load_image
from dstrain.data.metadata import RawValue, text_fault
from dstrain.data.videos import LOADER_VERSION as VIDEO_LOADER_VERSION
from dstrain.data.videos import Video, read_frames, read_images
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column, stored_kind
from dstrain.storage.hashing import Digests, hash_json


@dataclass(frozen=True, slots=True)
class Cell:
    """One input of one sample before decoding; small to send to a process.

    kind: as in Column. literal: the value of a text, integer or number. files: absolute
    paths. parameters: all but the files' bytes that decides what is loaded, (name,
    value) pairs; 'sizes' has one (height, width) per file, or one for all 'frames' of a
    video. size: (height, width) as loaded, of the first of several pictures; None if
    there are none.
    """

    kind: str
    literal: Any = None
    files: tuple[str, ...] = ()
    parameters: tuple[tuple[str, Any], ...] = ()
    size: tuple[int, int] | None = None

    @property
    def frames(self) -> int:
        """How many frames are loaded; 1 for a picture."""
        return len(dict(self.parameters)["frames"]) if self.kind == "video" else 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """(height, width) of each picture, or (frames, height, width) of a video; ()
        for what is no file.
        """
        sizes: tuple[tuple[int, int], ...] = dict(self.parameters).get("sizes", ())
        return (
            tuple((self.frames, *size) for size in sizes)
            if self.kind == "video"
            else sizes
        )


def load_cell(cell: Cell) -> Any:
    """Load what a cell holds: its literal, a picture, a list of pictures, or frames.

    Raises UsageError for a damaged file.
    """
    if not cell.files:
        return cell.literal
    parameters = dict(cell.parameters)
    if "frames" in parameters:
        return _load_clip(cell, parameters)
    images = [
        load_image(Path(file), parameters["mode"], size)
        for file, size in zip(cell.files, parameters["sizes"], strict=True)
    ]
    return images if cell.kind == "images" else images[0]


def _load_clip(cell: Cell, parameters: dict[str, Any]) -> Any:
    paths, size = [Path(file) for file in cell.files], parameters["sizes"][0]
    if parameters["source"] == "pictures":
        pixels = read_images(paths, size)
    else:
        pixels = read_frames(paths[0], parameters["frames"], size)
    if cell.kind == "image":
        return convert(Image.fromarray(pixels[0]), parameters["mode"])
    from torch import from_numpy  # late: a data set is checked without torch

    from dstrain.graph.values import Frames

    return Frames(from_numpy(pixels), parameters["fps"])


def read_literal(value: RawValue, column: Column) -> Cell | None:
    """Read a cell that names no file, and check it; None if it is absent. Raises
    ValueError saying what is wrong.
    """
    cell = _literal(value, column)
    fault = (
        column.check(cell.literal)
        if column.check is not None and cell is not None
        else ""
    )
    if fault:
        raise ValueError(fault)
    return cell


def _literal(value: RawValue, column: Column) -> Cell | None:
    if column.kind == "texts":
        return Cell("texts", texts(value))
    if not isinstance(value, str):
        raise ValueError(f"is a list, but a {column.kind} is one value")
    if column.kind == "text":
        if fault := text_fault(value):
            raise ValueError(fault)
        return Cell("text", value)
    text = value.strip()
    return (
        Cell(column.kind, _integer(text) if column.kind == "integer" else _number(text))
        if text
        else None
    )


def image_cell(
    column: Column,
    resolution: Resolution,
    files: Sequence[str],
    sizes: Sequence[tuple[int, int]],
) -> Cell:
    """The cell of pictures with these sizes in their files; raises ValueError for one
    too small.
    """
    loaded = tuple(_fit(size, resolution, column.multiple) for size in sizes)
    parameters = (("loader", LOADER_VERSION), ("mode", column.mode), ("sizes", loaded))
    return Cell(column.kind, None, tuple(files), parameters, loaded[0])


@dataclass(frozen=True)
class ResampledVideo:
    """A video in a row, before it is cut into clips.

    size: (height, width) as loaded. shown: the frames of the file that show it at the
    column's frame rate.
    """

    column: Column
    path: str
    video: Video
    size: tuple[int, int]
    frame_indices: tuple[int, ...]

    @classmethod
    def of(
        cls, column: Column, resolution: Resolution, path: str, video: Video
    ) -> "ResampledVideo":
        """Resample a video to the column's frame rate; raises ValueError if its frames
        are too small.
        """
        size = _fit(video.size, resolution, column.multiple)
        resampled = column.fps and video.fps
        shown = (
            frames_at_rate(video.timestamps, video.end, column.fps)
            if resampled
            else tuple(range(video.frames))
        )
        return cls(column, path, video, size, shown)

    def cell(self, clip: range) -> Cell:
        """The cell of one clip, or of the one frame of it that the column picks."""
        picked = {"first": clip[:1], "last": clip[-1:]}.get(self.column.frame, clip)
        frames = tuple(self.frame_indices[place] for place in picked)
        files = (
            tuple(self.video.files[frame] for frame in frames)
            if self.video.files
            else (self.path,)
        )
        parameters: list[tuple[str, Any]] = [
            ("loader", VIDEO_LOADER_VERSION),
            ("mode", self.column.mode),
            ("sizes", (self.size,)),
            ("source", "pictures" if self.video.files else "video"),
            ("frames", tuple(range(len(frames))) if self.video.files else frames),
        ]
        if self.column.kind == "video":
            parameters.append(("fps", self.column.fps or self.video.fps))
        return Cell(self.column.kind, None, files, tuple(parameters), self.size)


def _fit(
    size: tuple[int, int], resolution: Resolution, multiple: int
) -> tuple[int, int]:
    try:
        return fit(size, resolution, multiple)
    except UsageError as error:
        raise ValueError(error.what) from error


def file_names(value: RawValue, column: Column) -> list[str]:
    """Return the file names in a cell, none if it is blank; a list in csv is written as
    json.
    """
    if isinstance(value, str) and not value.strip():
        return []
    if column.kind in ("image", "video"):
        if not isinstance(value, str):
            raise ValueError(f"is a list, but one {column.kind} is read here")
        return [value]
    names = texts(value)
    if not all(name.strip() for name in names):
        raise ValueError("has a file name that is blank")
    return names


def texts(value: RawValue) -> list[str]:
    """Return the texts in a cell: a list (in csv written as json); a single one is a
    list of one, a blank cell none.
    """
    found: Any = value
    if isinstance(value, str):
        found = [value] if value.strip() else []
        if value.strip().startswith("[") and value.strip().endswith("]"):
            try:
                found = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f'is no list of texts such as ["a.png", "b.png"]: {error}'
                ) from error
    if not all(isinstance(text, str) for text in found):
        raise ValueError("has an entry that is no text")
    return list(found)


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{shown(text)!r} is not an integer (of at most 18 digits)")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or "_" in text:
        raise ValueError(f"{shown(text)!r} is not a finite number")
    return number


def input_key(cell: Cell, digests: Digests) -> str:
    """The key of an input: its text or number, or the bytes of its files and how they
    are loaded.
    """
    kind = stored_kind(cell.kind)
    if not cell.files:
        return hash_json("literal", [kind, cell.literal])
    contents = [digests.of(file) for file in cell.files]
    return hash_json("files", [kind, contents, cell.parameters])
