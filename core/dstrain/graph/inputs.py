"""Declare where each input of a variant comes from: one table per variant."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

Kind = Literal[
    "text", "texts", "integer", "number", "image", "images", "video", "tensors"
]
FileType = Literal["image", "video", "tensors"]


Axis = Literal[
    "frames",
    "height",
    "width",
    "original_height",
    "original_width",
    "crop_top",
    "crop_left",
]
"""The frames and sides of an image or video as it is loaded, the sides of its file, and what
is cut off above it and to its left, scaled and mirrored as it is."""


@dataclass(frozen=True)
class EntryCount:
    """How many entries a list has: as many as another list, or as a number says."""

    of: str
    """Name of the other input, a list or an integer."""
    more: int = 0
    """Entries beyond these."""


@dataclass(frozen=True)
class Column:
    """An input that is read from a column of the dataset."""

    name: str
    kind: Kind = "text"
    """Content of the cell: `image` and `video` name a file, `images` a list of files,
    `tensors` a safetensors file, which is read as a record of its tensors, and `texts` is
    a list of texts.
    """
    frame: Literal["", "first", "last"] = ""
    """For an image from a column of videos: the frame that is taken."""
    mode: Literal["RGB", "RGBA", "L"] = "RGB"
    """Colour mode that an image is converted to (Pillow's names); "L" is a mask, of a video
    too, whose frames stay RGB.
    """
    multiple: int = 0
    """Resize images and videos by --height, --width and --max_pixels to a height and
    width that are multiples of it; 0 keeps their size.
    """
    frame_multiple: int = 0
    """For a video, and an image from one: the number of frames is a multiple of it, plus
    one; 0 allows any.
    """
    least_frames: int = 1
    """For a video, and an image from one: the number of frames without which nothing is
    left to train."""
    fps: float = 0.0
    """Frames per second that a video is resampled to; 0 keeps its own."""
    same_in_batch: bool = False
    """Samples of one batch must have the same value."""
    optional: bool = False
    """It is read only if --extra_inputs names it."""
    check: Callable[[Any], str] | None = None
    """Returns what is wrong with a value, '' for nothing; not for files."""
    advice: str = ""
    """What to do where it is required and the dataset has no such column."""
    of: str = ""
    """For what shows the same as another input, such as masks, depths and edges, in images,
    lists of images or videos: the name of that, an image or a video before this one. In a
    row that has both they have its aspect ratio, and are loaded at its size, so that both
    are cropped alike.
    """
    entries: EntryCount | None = None
    """For a list: how many entries it has in rows that have both inputs."""
    same_size: bool = False
    """For a list of images: they are loaded at one size."""
    directed: bool = False
    """Whether it says a direction, as of a camera: its rows are not mirrored."""

    @property
    def is_file(self) -> bool:
        """Return whether the cell names a file or several."""
        return self.kind in ("image", "images", "video", "tensors")

    @property
    def from_video(self) -> bool:
        """Return whether the cell names a video, of which all or one frame is loaded."""
        return self.file_type == "video"

    @property
    def file_type(self) -> FileType:
        """Return what the files are that its cells name."""
        if self.kind == "tensors":
            return "tensors"
        return "video" if self.kind == "video" or self.frame else "image"


@dataclass(frozen=True)
class MaskColumn(Column):
    """A column of masks for the loss, as images: their last channel says what of the input
    that they are of counts, from 0, nothing, to 255. A blank cell stands for all of it.
    """

    not_empty: bool = False
    """Refuse a mask that is 0 everywhere."""


@dataclass(frozen=True)
class Measured:
    """An input that is a number of pixels, or of frames, of another one, an image or video,
    as it is loaded.
    """

    of: str
    """Name of the other input."""
    axis: Axis
    """What is measured. Inference measures the first three, and has the others only if they
    are given."""
    kind: ClassVar[Kind] = "integer"


@dataclass(frozen=True)
class InferenceOnly:
    """An input that only inference has; the dataset has no column for it."""

    kind: Kind = "text"


@dataclass(frozen=True)
class Constant:
    """An input that is a constant of the variant; a flag of its name changes it, if the
    family has one.
    """

    value: str | int | float
    toy: str | int | float | None = None
    """Value under --toy; None keeps the constant."""
    check: Callable[[Any], str] | None = None
    """As in Column."""

    @property
    def kind(self) -> Literal["text", "integer", "number"]:
        """Return the kind of its value."""
        if isinstance(self.value, str):
            return "text"
        return "number" if isinstance(self.value, float) else "integer"


def at_least(least: float) -> Callable[[Any], str]:
    """Return a check that a number is not less than this one."""
    return lambda value: (
        "" if value >= least else f"expected {least} or more, got {value}"
    )


def between(least: float, most: float) -> Callable[[Any], str]:
    """Return a check that a number is neither less than the first nor more than the other."""
    return lambda value: (
        ""
        if least <= value <= most
        else f"expected {least:g} to {most:g}, got {value:g}"
    )


@dataclass(frozen=True)
class OneOf:
    """A check that a text is one of several."""

    choices: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        """Return what is wrong with a value, '' for nothing."""
        if value in self.choices:
            return ""
        return f"expected one of {', '.join(self.choices)}, got {value!r}"


def one_of(*choices: str) -> OneOf:
    """Return a check that a text is one of these."""
    return OneOf(choices)


Input = Column | Measured | InferenceOnly | Constant


def with_measured(names: Iterable[str], inputs: Mapping[str, Input]) -> frozenset[str]:
    """Return these inputs and those that are measured on them."""
    present = frozenset(names)
    measured = [
        name
        for name, source in inputs.items()
        if isinstance(source, Measured) and source.of in present
    ]
    return present.union(measured)


def as_column(name: str, source: Input) -> Column:
    """Return the column that reads an input of inference, where images keep their size."""
    if isinstance(source, Column):
        # At inference the units resize.
        return replace(source, name=name, multiple=0, frame="", optional=False)
    check = source.check if isinstance(source, Constant) else None
    return Column(name, source.kind, check=check)
