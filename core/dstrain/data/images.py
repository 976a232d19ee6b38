"""Pictures: what size they are loaded at, told from the header alone, and how they are
loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isqrt
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dstrain.data.packets import MAX_FRAME_PIXELS
from dstrain.data.truncation import check_end
from dstrain.errors import UsageError

LOADER_VERSION = 2
"""Raised when `load_image` returns other pixels for the same file, so that stored
results are not used for it.
"""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Kinds of file that are opened. Left out on purpose: EPS and its like, which run a
program to be decoded.
"""
ANIMATED = frozenset({"GIF", "PNG", "WEBP"})
"""Of these, the ones whose frames follow each other in time; the pages of a TIFF do
not.
"""
MAX_PIXELS = 2**28
"""Pixels of the largest picture that is opened, told by its header: three times the
largest of cameras.
"""
MAX_ANIMATION_PIXELS = 2**35
"""Pixels of all frames of an animated picture together: ten minutes of 1920 x 1080 at
25 frames a second.
"""
# Of pictures above its limit Pillow warns, and `_check_pixels` refuses them; those of
# twice that Pillow refuses, also where a later frame is the large one.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
JPEGS = frozenset({"JPEG", "MPO"})
DEFAULT_DURATION = 100
"""Milliseconds for which a frame is shown whose duration is given as 0."""
GREY_16 = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})
MODES = GREY_16 | {
    "F",
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
}
TRANSPOSES = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
"""EXIF orientation (Exif 2.32, tag 0x0112) -> the turn that makes the picture upright.
"""
SIDEWAYS = frozenset({5, 6, 7, 8})


@dataclass(frozen=True)
class Resolution:
    """Wanted sizes in pixels: fixed (height and width), or dynamic (neither), which
    `max_pixels` bounds.
    """

    height: int | None
    width: int | None
    max_pixels: int

    def __post_init__(self) -> None:
        if (self.height is None) != (self.width is None):
            raise UsageError(
                "--height, --width",
                "give both for a fixed size, or neither for a dynamic one",
            )
        for flag, value in (
            ("--height", self.height),
            ("--width", self.width),
            ("--max_pixels", self.max_pixels),
        ):
            if value is not None and value < 1:
                raise UsageError(flag, f"{value} is not a positive number of pixels")

    def check(self, multiple: int) -> None:
        """Raise UsageError if the fixed size is not a multiple of `multiple`; 0 allows
        any.
        """
        for flag, value in (("--height", self.height), ("--width", self.width)):
            if multiple and value is not None and value % multiple:
                near = max(multiple, round(value / multiple) * multiple)
                raise UsageError(
                    flag,
                    f"{value} is not a multiple of {multiple}; the nearest is {near}",
                )


def fit(
    size: tuple[int, int], resolution: Resolution, multiple: int
) -> tuple[int, int]:
    """Return the (height, width) at which a picture of size (height, width) is loaded.

    With `multiple` 0 the size stays. Fixed: the size given. Dynamic: a picture of more
    than max_pixels shrinks to it, keeping its aspect ratio, others stay; then both
    sides are cut down to multiples. Raises UsageError if that leaves nothing.
    """
    if not multiple:
        return size
    resolution.check(multiple)
    if resolution.height is not None and resolution.width is not None:
        return resolution.height, resolution.width
    height, width = size
    if height * width > resolution.max_pixels:
        # sqrt(max_pixels * height / width) and its twin, in integers: floating point
        # falls just below whole numbers.
        height, width = (
            isqrt(resolution.max_pixels * height // width),
            isqrt(resolution.max_pixels * width // height),
        )
    height, width = height // multiple * multiple, width // multiple * multiple
    if not height or not width:
        raise UsageError(
            "picture",
            f"{size[0]} x {size[1]} (height x width) leaves nothing at multiples of {multiple}",
        )
    return height, width


def read_size(path: Path) -> tuple[int, int]:
    """Return (height, width) of the upright picture from the file's header.

    Raises UsageError if it is no picture, has too many pixels, or ends before the
    picture does.
    """
    with _opened(path) as image:
        check_end(image, path)
        width, height = image.size
        return (width, height) if _orientation(image) in SIDEWAYS else (height, width)


def is_image(path: Path) -> bool:
    """Say whether a file begins as a picture of a kind that is read does; it may be
    damaged behind that.
    """
    try:
        with Image.open(path, formats=FORMATS):
            return True
    except UnidentifiedImageError:
        return False
    except Exception:  # as in `_opened`, which tells what is wrong
        return True


def frame_durations(path: Path) -> tuple[int, ...]:
    """Return how long each frame of a picture is shown, in milliseconds; one that does
    not move has one frame.

    A duration of 0 is read as 100, as browsers do. Raises UsageError for a damaged
    file, and for one whose frames have too many pixels together.
    """
    with _opened(path) as image:
        check_end(image, path)
        frames = getattr(image, "n_frames", 1) if image.format in ANIMATED else 1
        if frames == 1:
            return (DEFAULT_DURATION,)
        if frames * image.width * image.height > MAX_ANIMATION_PIXELS:
            what = f"has {frames:,} frames of {image.height:,} x {image.width:,} (height x width)"
            raise UsageError(
                str(path),
                f"{what}; all frames together have at most {MAX_ANIMATION_PIXELS:,} pixels",
            )
        shown = []
        for number in range(frames):
            image.seek(number)
            image.load()  # WebP tells the duration then
            shown.append(int(image.info.get("duration") or DEFAULT_DURATION))
        return tuple(shown)


def load_image(
    path: Path, mode: str, size: tuple[int, int] | None, number: int = 0
) -> Image.Image:
    """Load a picture upright, in `mode` (RGB, RGBA or L), at exactly `size` (height,
    width).

    It is scaled to cover that size and cropped about its centre; without `size` it
    keeps its own. Transparent parts are shown over white unless the mode is RGBA;
    16-bit grey, and float grey from 0 to 1, become 8-bit grey; colour profiles are not
    applied. A JPEG of four times the size or more is decoded at a half, a quarter or an
    eighth of its own, at least twice the size asked for. number: which frame of an
    animated one. Raises UsageError for a damaged file.
    """
    with _opened(path) as image:
        orientation = _orientation(image)
        if size is not None and image.format in JPEGS:
            height, width = size[::-1] if orientation in SIDEWAYS else size
            scale = 2 * max(height / image.height, width / image.width)
            image.draft(None, (ceil(scale * image.width), ceil(scale * image.height)))
        if number:
            image.seek(number)
        image.load()
        converted = convert(image, mode)
    if orientation in TRANSPOSES:
        converted = converted.transpose(TRANSPOSES[orientation])
    return cover(converted, size)


def cover(image: Image.Image, size: tuple[int, int] | None) -> Image.Image:
    """Scale a picture to cover `size` (height, width) and crop it about its centre;
    None leaves it.
    """
    if size is not None and size != (image.height, image.width):
        return ImageOps.fit(image, (size[1], size[0]), Image.Resampling.LANCZOS)
    return image


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_pixels(image, path)
            if image.mode not in MODES:
                raise UsageError(
                    str(path), f"colour mode {image.mode} is not read; save it as RGB"
                )
            yield image
    except UsageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UsageError(
            str(path), f"has too many pixels: a picture has at most {MAX_PIXELS:,}"
        ) from error
    except UnidentifiedImageError as error:
        raise UsageError(
            str(path), f"is not a picture of a kind that is read ({', '.join(FORMATS)})"
        ) from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise UsageError(
            str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _check_pixels(image: Image.Image, path: Path) -> None:
    """Refuse a picture that is too large to be decoded, which for one that moves is
    smaller.
    """
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise Image.DecompressionBombError
    if (
        pixels > MAX_FRAME_PIXELS
        and image.format in ANIMATED
        and getattr(image, "is_animated", False)
    ):
        what = f"has too many pixels: a picture that moves has at most {MAX_FRAME_PIXELS:,} a frame"
        raise UsageError(str(path), what)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation still to be applied, 1 to 8, without decoding the
    picture.
    """
    if image.format == "TIFF":
        return 1  # Pillow turns these itself, in the header's size as well
    try:
        # The base class's method: the one for PNG decodes the whole picture to look for
        # EXIF data behind the pixels.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # a picture with damaged EXIF data is shown as stored
        return 1


def convert(image: Image.Image, mode: str) -> Image.Image:
    """Return an 8-bit copy of a picture in another colour mode; see `load_image`."""
    if image.mode in GREY_16 or image.mode == "F":
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if mode != "RGBA":
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image).convert("RGB")
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    return image.copy() if image.mode == mode else image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 0..65535, or of floats 0..1, to 0..255, rounded; Pillow alone would clip."""
    if image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # NaN is neither
            raise ValueError(
                "float values beyond 0 (black) to 1 (white); save it as 8-bit RGB"
            )
        return Image.fromarray((values * 255 + 0.5).astype(np.uint8))
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError("grey values beyond 16 bits; save it as 8-bit RGB")
    return Image.fromarray(((pixels * 255 + 32767) // 65535).astype(np.uint8))
