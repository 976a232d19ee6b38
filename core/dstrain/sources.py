"""Where a variant's inputs come from when they are read from a data set: one table per variant."""

from dataclasses import dataclass
from typing import Literal

FILE_KINDS = frozenset({"picture", "pictures", "frames"})


@dataclass(frozen=True)
class Column:
    """An input read from the data set's column `name`.

    kind: `picture` and `frames` name a file, `pictures` a list of them; the others are the cell itself, `texts` a list.
    pick: for a picture taken from a video's column, which frame.
    mode: the colour mode a picture is converted to (Pillow's names).
    multiple: resize pictures and frames by --height, --width, --max_pixels to sides that are multiples of it;
    0 leaves the size as it is.
    """

    name: str
    kind: Literal["text", "texts", "integer", "number", "picture", "pictures", "frames"] = "text"
    pick: Literal["", "first", "last"] = ""
    mode: Literal["RGB", "RGBA", "L"] = "RGB"
    multiple: int = 0

    @property
    def is_file(self) -> bool:
        """Whether the cell names a file (or several)."""
        return self.kind in FILE_KINDS


@dataclass(frozen=True)
class Size:
    """An input measured on another one as loaded: its height or width in pixels, or its number of frames."""

    of: str
    axis: Literal["height", "width", "frames"]


@dataclass(frozen=True)
class Given:
    """An input that only inference gives; a data set has no column for it."""


Source = Column | Size | Given
