"""Whether a picture's file is all there, told from its header and its end; no pixel is
decoded.
"""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from PIL import Image

from dstrain.errors import UsageError

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
TAIL = 64
"""Bytes at the end of a file in which its end mark is looked for before the whole is
searched.
"""
BITS = MappingProxyType(
    {"1": 1, "L": 8, "P": 8, "I;16B": 16, "I": 16, "RGB": 24, "F": 32}
)
"""Least bits of a pixel in a PPM file, by Pillow's colour mode."""


def check_end(image: Image.Image, path: Path) -> None:
    """Raise UsageError for a picture file, opened by Pillow, that ends before its
    picture does.
    """
    is_whole = _ENDS.get(image.format or "")
    if is_whole is None:
        return
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not is_whole(image, file, size):
            what = (
                f"is half-written or damaged: it does not end as a {image.format} does"
            )
            raise UsageError(str(path), what)


def _tail(file: IO[bytes], size: int) -> bytes:
    file.seek(max(0, size - TAIL))
    return file.read()


def _png(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """PNG, third edition, 5.3: chunks of length, name, data and checksum; IEND is the
    last.
    """
    if _tail(file, size).endswith(PNG_END):
        return True
    place = 8
    while place + 12 <= size:  # something follows the end
        file.seek(place)
        length, name = int.from_bytes(file.read(4), "big"), file.read(4)
        if name == b"IEND":
            return True
        place += 12 + length
    return False


def _jpeg(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """ITU T.81, B.1: after the first start of scan (0xFFDA), 0xFFD9 is the end and
    stands for nothing else.
    """
    if _tail(file, size).rstrip(b"\0\r\n ").endswith(JPEG_END):
        return True
    file.seek(0)
    data = file.read()
    place = 2
    while (
        place + 4 <= size and data[place] == 0xFF
    ):  # something follows the end, as in the pictures of some phones
        if data[place + 1] == 0xDA:
            return data.find(JPEG_END, place) >= 0
        is_fill = data[place + 1] == 0xFF
        place += (
            1 if is_fill else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        )
    return False


def _gif(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """GIF89a, 27: the trailer is 0x3B. A GIF does not say how many frames it has, so
    half of one looks shorter.
    """
    return _tail(file, size).rstrip(b"\0\r\n").endswith(b";")


def _webp(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """RFC 9649, 2.4: the size of the RIFF chunk stands behind its name."""
    file.seek(4)
    return int.from_bytes(file.read(4), "little") + 8 <= size


def _avif(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """ISO/IEC 14496-12, 4.2: boxes follow each other, each with its length first."""
    place = 0
    while place + 8 <= size:
        file.seek(place)
        length = int.from_bytes(file.read(4), "big")
        if length == 1:
            file.seek(4, 1)
            length = int.from_bytes(file.read(8), "big")
        if not length:  # to the end of the file
            return True
        place += max(length, 8)
    return place == size


def _raw(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """Rows of pixels without compression, where Pillow found them: BMP, PPM."""
    for tile in getattr(image, "tile", ()):
        codec, _, offset, arguments = tile
        if (
            codec == "raw"
            and image.format == "BMP"
            and offset + int(arguments[1]) * image.height > size
        ):
            return False
        if codec in ("raw", "ppm") and image.format == "PPM":
            row = (image.width * BITS.get(image.mode, 8) + 7) // 8
            if (
                offset
                + (row if codec == "raw" or image.mode != "I" else 2 * image.width)
                * image.height
                > size
            ):
                return False
    return True


def _tiff(image: Image.Image, file: IO[bytes], size: int) -> bool:
    """TIFF 6.0: StripOffsets 273 and StripByteCounts 279, TileOffsets 324 and
    TileByteCounts 325.
    """
    tags: Any = getattr(image, "tag_v2", {})
    for offsets, counts in ((273, 279), (324, 325)):
        if offsets in tags and counts in tags:
            parts = zip(tags[offsets], tags[counts], strict=False)
            if any(offset + count > size for offset, count in parts):
                return False
    return True


_ENDS: "MappingProxyType[str, Callable[[Image.Image, IO[bytes], int], bool]]" = (
    MappingProxyType(
        {
            "AVIF": _avif,
            "BMP": _raw,
            "GIF": _gif,
            "JPEG": _jpeg,
            "MPO": _jpeg,  # a JPEG with others behind it
            "PNG": _png,
            "PPM": _raw,
            "TIFF": _tiff,
            "WEBP": _webp,
        }
    )
)
