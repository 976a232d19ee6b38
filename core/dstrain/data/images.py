"""Images: the size they are loaded at, known from the header alone, and loading."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isqrt
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from dstrain.data.buckets import Buckets
from dstrain.data.faults import raise_system_fault
from dstrain.data.packets import MAX_FRAME_PIXELS
from dstrain.data.variants import PLAIN, View
from dstrain.errors import DstrainError, UsageError
from dstrain.storage.hashing import FileMark

Size = tuple[int, int]
"""(height, width) in pixels."""
LOADER_VERSION = 3
"""Raised when `load_image` returns other pixels for the same file, so that cached values
are not used for it.
"""
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that are read and written. Left out on purpose: EPS and its like, which run a program
to be decoded.
"""
ANIMATED = frozenset({"GIF", "PNG", "WEBP"})
"""The formats whose frames follow each other in time; the pages of a TIFF do not."""
HALF_GREY = 128
"""The least value, of 255, that counts as white in a mask."""
MAX_PIXELS = 2**28
"""Pixels of the largest image that is opened: three times the largest of cameras."""
MAX_ANIMATION_PIXELS = 2**35
"""Pixels of all frames of an animated image together: ten minutes of 1920 x 1080 at 25
frames a second.
"""
# Pillow only warns of images above its limit, and `_opened` refuses them; Pillow
# itself refuses those of twice the limit, also where a later frame is the large one.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
DEFAULT_DURATION = 100
"""Milliseconds for which a frame is shown whose duration is at most 10, as in browsers."""
GREY_16 = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})
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
"""EXIF orientation (Exif 2.32, tag 0x0112) -> what makes the image upright."""
SIDEWAYS = frozenset({5, 6, 7, 8})


@dataclass(frozen=True)
class ImageInfo:
    """An image, inspected by its header."""

    path: str
    size: Size
    """(height, width), upright."""
    mark: FileMark
    """The file's mark when it was inspected."""
    has_alpha: bool = False
    """Whether parts of it may be transparent."""


@dataclass(frozen=True)
class Resolution:
    """The size images are loaded at, in pixels: fixed (height and width), that of a
    bucket, or their own (neither), up to `max_pixels`.
    """

    height: int | None
    width: int | None
    max_pixels: int
    buckets: Buckets | None = None

    def check(self, multiple: int) -> None:
        """Raise UsageError unless the fixed size is a multiple of `multiple`; 0 allows
        any.
        """
        for flag, value in (("--height", self.height), ("--width", self.width)):
            if multiple and value is not None and value % multiple:
                near = max(multiple, round(value / multiple) * multiple)
                raise UsageError(
                    flag,
                    f"{value} is not a multiple of {multiple}; the nearest is {near}",
                )


def fit(size: Size, resolution: Resolution, multiple: int) -> Size:
    """Return the (height, width) at which an image of size (height, width) is loaded.

    With a multiple of 0 the size stays. Otherwise it is the fixed size, that of a bucket,
    or the image's own: scaled down to max_pixels with its aspect ratio, then both sides cut to
    multiples. Raises ValueError if that leaves nothing.
    """
    if not multiple:
        return size
    if resolution.height is not None and resolution.width is not None:
        return resolution.height, resolution.width
    if resolution.buckets is not None:
        return resolution.buckets.fit(size, multiple)
    height, width = size
    limit = resolution.max_pixels
    if height * width > limit:
        # sqrt(limit * height / width) and sqrt(limit * width / height), in integers:
        # floating point may fall just below a whole number.
        height, width = isqrt(limit * height // width), isqrt(limit * width // height)
    height -= height % multiple
    width -= width % multiple
    if not height or not width:
        is_limit = min(size) >= multiple
        cause = f" within --max_pixels {limit}: raise that" if is_limit else ""
        raise ValueError(
            f"{size[0]} x {size[1]} (height x width) is too small for sides that are "
            f"multiples of {multiple}{cause}"
        )
    return height, width


def read_size(path: Path) -> Size:
    """Return the (height, width) of the upright image from its file's header.

    Raises UsageError if the file is not an image or has too many pixels.
    """
    return read_header(path)[0]


def read_header(path: Path) -> tuple[Size, bool]:
    """Return what `read_size` returns, and whether parts of the image may be transparent."""
    with _opened(path) as image:
        width, height = image.size
        is_sideways = _orientation(image) in SIDEWAYS
        size = (width, height) if is_sideways else (height, width)
        return size, image.has_transparency_data


def is_image(path: Path) -> bool:
    """Return whether a file begins like an image; the rest may be damaged."""
    try:
        with Image.open(path, formats=FORMATS):
            return True
    except UnidentifiedImageError:
        return False
    except Exception:  # an image, then; `_opened` says what is wrong with it
        return True


def has_transparent_parts(path: str) -> bool:
    """Return whether a pixel of an image is not opaque; decodes it, so that only images
    whose header has an alpha channel or a transparent colour are to be asked about.

    False for a damaged file, which is named when it is loaded.
    """
    try:
        with _opened(Path(path)) as image:
            alpha = image.convert("RGBA").getchannel("A")
            return alpha.getextrema() != (255, 255)
    except UsageError:
        return False


def frame_durations(path: Path) -> tuple[int, ...]:
    """Return how long each frame of an image is shown, in milliseconds; a still image
    has one frame.

    Raises UsageError for a damaged file, and for frames with too many pixels together.
    """
    with _opened(path) as image:
        frames = getattr(image, "n_frames", 1) if image.format in ANIMATED else 1
        if frames == 1:
            return (DEFAULT_DURATION,)
        if frames * image.width * image.height > MAX_ANIMATION_PIXELS:
            raise UsageError(
                path,
                f"has {frames:,} frames of {image.height:,} x {image.width:,} (height x "
                f"width); all frames together have at most {MAX_ANIMATION_PIXELS:,} pixels",
            )
        durations = []
        for number in range(frames):
            image.seek(number)
            image.load()  # WebP knows the duration only then
            duration = int(image.info.get("duration") or 0)
            durations.append(duration if duration > 10 else DEFAULT_DURATION)
        return tuple(durations)


LIGHT = 32
"""Masks without a value from this on, of 255, are of labels."""
SCALED = "scaled"
"""The note in a mask that was of 0 and 1."""


def load_image(
    path: Path,
    mode: str,
    size: Size | None,
    frame: int = 0,
    view: View = PLAIN,
    is_mask: bool = False,
) -> Image.Image:
    """Load an image upright, scaled to cover `size` and cropped, by default about its
    centre.

    Transparent parts are shown over white unless the mode is RGBA; 16-bit grey, and
    float grey from 0 to 1, become 8-bit grey; colour profiles are not applied. Raises
    UsageError for a damaged file.

    Args:
        mode: RGB, RGBA or L.
        size: (height, width) in pixels; None keeps the image's own.
        frame: Which frame of an animated image, from 0.
        is_mask: Whether one of 0 and 1 becomes one of 0 and 255, with the note `SCALED`:
            tools for segmentation write it, and it looks black.
    """
    with _opened(path) as image:
        if image.format == "PNG":
            # Pillow skips the checksums of the pixels while it decodes.
            with Image.open(path, formats=("PNG",)) as checked:
                checked.verify()
        orientation = _orientation(image)
        if size is not None:
            # A JPEG of four times the size or more is decoded at a half, a quarter or an
            # eighth of its own: faster, and still at least twice as large as needed.
            height, width = size[::-1] if orientation in SIDEWAYS else size
            scale = 2 * max(height / image.height, width / image.width)
            enough = ceil(scale * image.width), ceil(scale * image.height)
            image.draft(None, enough)
        if frame:
            image.seek(frame)
        image.load()
        converted = convert(image, mode)
        is_scaled = is_mask and mode == "L" and _is_of_0_and_1(image, converted)
    if is_scaled:
        # Before it is scaled to a size, which needs the grey between black and white.
        converted = converted.point([0] + [255] * 255)
    if orientation in TRANSPOSES:
        converted = converted.transpose(TRANSPOSES[orientation])
    loaded = cover(converted, size, view)
    # The feature cache stores pixels: a unit must find no more without it.
    loaded.info = {SCALED: True} if is_scaled else {}
    return loaded


def _is_of_0_and_1(image: Image.Image, mask: Image.Image) -> bool:
    """Return whether a mask, of an image as it was opened, is of 0 and 1; raise ValueError
    for one of labels.
    """
    if image.mode == "P" and np.ptp(np.asarray(image.convert("RGB")), axis=2).any():
        raise ValueError("a mask in colours; save it in black and white")
    brightest = np.asarray(image if image.mode in GREY_16 else mask).max()
    if brightest > 1 and np.asarray(mask).max() < LIGHT:
        what = (
            f"a mask whose brightest value is {brightest}; save it in black and white"
        )
        raise ValueError(what)
    return bool(brightest == 1)


def cover(image: Image.Image, size: Size | None, view: View = PLAIN) -> Image.Image:
    """Scale an image to cover `size` (height, width) and crop it; None leaves its size."""
    if size is not None and size != (image.height, image.width):
        height, width = size
        image = ImageOps.fit(
            image,
            (width, height),
            Image.Resampling.LANCZOS,
            centering=(view.crop, view.crop),
        )
    return image.transpose(TRANSPOSES[2]) if view.flip else image


def cut_off(own: Sequence[int], size: Sequence[int], view: View) -> list[int]:
    """Return the rows above, and the columns to the left of, what `cover` keeps of an image
    of size `own` that it scales to cover `size` (both (height, width)).
    """
    scale = max(size[0] / own[0], size[1] / own[1])
    crop = (view.crop, 1 - view.crop if view.flip else view.crop)
    return [round((own[i] * scale - size[i]) * crop[i]) for i in (0, 1)]


def white_pixels(mask: Image.Image, size: Size) -> NDArray[np.bool_]:
    """Return which pixels of a mask are white, from half grey on, at a size (height, width):
    of the pixels that become one, a single one tells, as DiffSynth-Studio has it.
    """
    height, width = size
    resized = mask.resize((width, height), Image.Resampling.NEAREST)
    white: NDArray[np.bool_] = np.asarray(convert(resized, "L")) >= HALF_GREY
    return white


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile.ImageFile]:
    """Open an image, and raise UsageError for anything that goes wrong inside."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            # Frames of an animation have a lower limit.
            is_animated = image.format in ANIMATED and getattr(
                image, "is_animated", False
            )
            limit = MAX_FRAME_PIXELS if is_animated else MAX_PIXELS
            if image.width * image.height > limit:
                raise Image.DecompressionBombError
            if image.mode == "LAB":  # which Pillow cannot convert
                raise ValueError("colour mode LAB; save it as RGB")
            yield image
    except DstrainError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        what = f"has too many pixels: the limit is {MAX_PIXELS:,}, and {MAX_FRAME_PIXELS:,} for a frame of an animation"
        raise UsageError(path, what) from error
    except UnidentifiedImageError as error:
        what = f"is not an image in a supported format ({', '.join(FORMATS)})"
        raise UsageError(path, what) from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise_system_fault(path, error)
        reason = getattr(error, "strerror", None) or error
        raise UsageError(path, f"cannot be read: {reason}") from error


def _orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation still to be applied, 1 to 8, without decoding."""
    if image.format == "TIFF":
        return 1  # Pillow applies it, in the header's size as well
    try:
        # The base class's method: the one for PNG decodes the whole image to look for
        # EXIF data behind the pixels.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception as error:  # an image with damaged EXIF data is shown as stored
        raise_system_fault(Path(os.fsdecode(image.filename)), error)
        return 1


def convert(image: Image.Image, mode: str) -> Image.Image:
    """Return an 8-bit copy of an image in another colour mode; see `load_image`."""
    if image.mode in GREY_16 or image.mode == "F":
        clear = image.info.get("transparency")
        opaque = np.asarray(image) != (-1 if clear is None else clear)
        image = _to_8_bits(image)
        if not np.all(opaque):
            image.putalpha(Image.fromarray(np.uint8(255) * opaque))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if mode != "RGBA":
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image).convert("RGB")
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    return image.copy() if image.mode == mode else image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 0..65535, or floats 0..1, to 0..255, rounded; Pillow alone would clip."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):  # NaN is neither
            raise ValueError(
                "float values outside 0 (black) to 1 (white); save it as 8-bit RGB"
            )
        return Image.fromarray((values * 255 + 0.5).astype(np.uint8))
    if image.format == "TIFF" and image.mode == "I" and 0 < values.max() < 256:
        raise ValueError(
            "32-bit grey values of 8 bits, which would be black; save it as 8-bit RGB"
        )
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("grey values beyond 16 bits; save it as 8-bit RGB")
    wide = values.astype(np.int64)
    if wide.max() == 1:  # a mask, as segmentation tools write it
        return Image.fromarray(wide.astype(np.uint8))
    return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
