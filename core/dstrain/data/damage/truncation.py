"""Check that an image file is complete, from its header and its end, without decoding."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from PIL import ImageFile

from dstrain.errors import UsageError

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
JPEG_SCAN = 0xDA
JPEG_FILL = 0xFF
TAIL = 64
"""Bytes at the end of a file that are searched for its end mark, before all are."""
BITS = MappingProxyType({"1": 1, "I;16B": 16, "I": 16, "RGB": 24, "F": 32})
"""Least bits of a pixel without compression, by Pillow's colour mode; else 8."""


@dataclass(frozen=True)
class _File:
    """An image file, open in Pillow and for its bytes."""

    image: ImageFile.ImageFile
    stream: IO[bytes]
    size: int

    def read(self, start: int, length: int = -1) -> bytes:
        """Read bytes from a place on, all of them without a length."""
        self.stream.seek(max(0, start))
        return self.stream.read(length)

    def tail(self) -> bytes:
        """Read the last bytes."""
        return self.read(self.size - TAIL)


def check_end(image: ImageFile.ImageFile, path: Path) -> None:
    """Raise UsageError for an image file, opened by Pillow, that ends too early."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not _CHECKS[image.format or ""](_File(image, file, size)):
            what = f"is truncated or damaged: it does not end like a {image.format}"
            raise UsageError(path, what)


def _png(file: _File) -> bool:
    """PNG, third edition, 5.3: IEND is the last chunk. Something may follow it."""
    return file.tail().endswith(PNG_END) or PNG_END in file.read(0)


def _jpeg(file: _File) -> bool:
    """ITU T.81, B.1: after the first start of scan (0xFFDA), 0xFFD9 is the end and
    stands for nothing else.
    """
    if file.tail().rstrip(b"\0\r\n ").endswith(JPEG_END):
        return True
    # Something may follow the end, as in the images of some phones. The segments before
    # the scan, which Pillow has read, may hold a small image with an end of its own.
    data = file.read(0)
    scan = jpeg_segments(data).get(JPEG_SCAN, file.size)
    return JPEG_END in data[scan:]


def jpeg_segments(jpeg: bytes) -> dict[int, int]:
    """Return where each kind of segment of a JPEG first begins, by the second byte of
    its marker; the first scan is the last of them.
    """
    places: dict[int, int] = {}
    place = 2
    while place + 4 <= len(jpeg) and JPEG_SCAN not in places:
        marker = jpeg[place + 1]
        if marker == JPEG_FILL:
            place += 1
            continue
        places.setdefault(marker, place)
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return places


def _gif(file: _File) -> bool:
    """GIF89a, 27: the trailer is 0x3B. A GIF does not say how many frames it has, so a
    truncated one looks shorter.
    """
    return file.tail().rstrip(b"\0\r\n").endswith(b";")


def _webp(file: _File) -> bool:
    """RFC 9649, 2.4: the size of the RIFF chunk follows its name."""
    return int.from_bytes(file.read(4, 4), "little") + 8 <= file.size


def _avif(file: _File) -> bool:
    """ISO/IEC 14496-12, 4.2: boxes follow each other, each with its length first."""
    place = 0
    while place + 8 <= file.size:
        length = int.from_bytes(file.read(place, 4), "big")
        if length == 1:
            length = int.from_bytes(file.read(place + 8, 8), "big")
        if length == 0:  # to the end of the file
            return True
        place += max(length, 8)
    return place == file.size


def _rows(file: _File) -> bool:
    """Rows of pixels without compression, each of whole bytes; text formats pass."""
    image = file.image
    for codec, _, offset, arguments in image.tile:
        row = (image.width * BITS.get(image.mode, 8) + 7) // 8
        if codec == "raw" and isinstance(arguments, tuple):
            row = (
                arguments[1] or row
            )  # BMP pads its rows, and Pillow found their length
        if codec in ("raw", "ppm") and offset + row * image.height > file.size:
            return False
    return True


def _tiff(file: _File) -> bool:
    """TIFF 6.0: StripOffsets 273 and StripByteCounts 279, TileOffsets 324 and
    TileByteCounts 325.
    """
    tags: Any = getattr(file.image, "tag_v2", {})
    offsets = tags.get(273) or tags.get(324) or ()
    counts = tags.get(279) or tags.get(325) or ()
    parts = zip(offsets, counts, strict=False)
    return all(offset + count <= file.size for offset, count in parts)


_CHECKS = MappingProxyType(
    {
        "AVIF": _avif,
        "BMP": _rows,
        "GIF": _gif,
        "JPEG": _jpeg,
        "MPO": _jpeg,  # a JPEG with others behind it
        "PNG": _png,
        "PPM": _rows,
        "TIFF": _tiff,
        "WEBP": _webp,
    }
)
