"""Where a variant's inputs come from when they are read from a data set: one table per
variant.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["text", "texts", "integer", "number", "image", "images", "video"]
FILE_KINDS = frozenset({"image", "images", "video"})
STORED_KINDS = MappingProxyType(
    {"image": "picture", "images": "pictures", "video": "frames"}
)
"""Kind -> the word that cache keys and shard headers have for it. Keys change once, with
the next format; until then the words that are stored stay."""


def stored_kind(kind: str) -> str:
    """Return the word that stored keys have for a kind."""
    return STORED_KINDS.get(kind, kind)


@dataclass(frozen=True)
class Column:
    """An input read from the data set's column `name`.

    kind: `image` and `video` name a file, `images` a list of them; the others are
    the cell itself, `texts` a list. pick: for a picture taken from a video's column,
    which frame. mode: the colour mode a picture is converted to (Pillow's names).
    multiple: resize pictures and frames by --height, --width, --max_pixels to sides
    that are multiples of it; 0 leaves the size as it is. frames: for frames, and a
    picture picked from them: their number is a multiple of it, plus one; 0 allows any.
    fps: frames per second that a video is resampled to; 0 leaves them as they are.
    alike: samples of one batch must have the same value. extra: it is read only where
    --extra_inputs names it. check: for a cell itself: its value -> what is wrong with
    it, '' for nothing.
    """

    name: str
    kind: Kind = "text"
    frame: Literal["", "first", "last"] = ""
    mode: Literal["RGB", "RGBA", "L"] = "RGB"
    multiple: int = 0
    frame_multiple: int = 0
    fps: float = 0.0
    same_in_batch: bool = False
    optional: bool = False
    check: Callable[[Any], str] | None = None

    @property
    def is_file(self) -> bool:
        """Whether the cell names a file (or several)."""
        return self.kind in FILE_KINDS

    @property
    def from_video(self) -> bool:
        """Whether it names a video, whose frames or one frame of which are loaded."""
        return self.kind == "video" or bool(self.frame)


@dataclass(frozen=True)
class Measured:
    """An input measured on another one as loaded: its height or width in pixels, or its
    number of frames.
    """

    of: str
    axis: Literal["height", "width", "frames"]


@dataclass(frozen=True)
class InferenceOnly:
    """An input that only inference gives; a data set has no column for it. kind: as in
    Column.
    """

    kind: Kind = "text"


@dataclass(frozen=True)
class Constant:
    """An input that is a constant of the variant: no row gives it; a flag of its name
    changes it if the family has one.

    toy: the value under --toy; None leaves it. check: as in Column.
    """

    value: str | int | float
    toy: str | int | float | None = None
    check: Callable[[Any], str] | None = None

    @property
    def kind(self) -> Literal["text", "integer", "number"]:
        """What its value is, and what text is read as that changes it."""
        if isinstance(self.value, str):
            return "text"
        return "number" if isinstance(self.value, float) else "integer"

    def as_column(self, name: str) -> Column:
        """The column as which text is read that changes it."""
        return Column(name, self.kind, check=self.check)


def at_least(least: float) -> Callable[[Any], str]:
    """A check of a number: it is so much or more."""
    return lambda value: "" if value >= least else f"want {least} or more, got {value}"


Input = Column | Measured | InferenceOnly | Constant


def as_column(name: str, source: Input) -> Column:
    """The column `name` from which an input is read as inference takes it: pictures
    keep their size.
    """
    if isinstance(source, Constant):
        return source.as_column(name)
    if not isinstance(source, Column):
        return Column(name, _kind(source))
    # Units resize what inference gives them.
    return replace(source, name=name, multiple=0, frame="", optional=False)


def _kind(source: Input) -> Kind:
    """What an input is read as; a measured one is an integer."""
    return "integer" if isinstance(source, Measured) else source.kind
