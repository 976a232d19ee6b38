"""Check that an image file is complete, from its header and its end, without decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from PIL import Image

from dstrain.errors import UsageError

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
JPEG_START_OF_SCAN = 0xDA
TAIL = 64
"""Bytes at the end of a file that are searched for its end mark, before all are."""
BITS = MappingProxyType(
    {"1": 1, "L": 8, "P": 8, "I;16B": 16, "I": 16, "RGB": 24, "F": 32}
)
"""Least bits of a pixel in a PPM file, by Pillow's colour mode."""


@dataclass(frozen=True)
class _File:
    """An image file, open in Pillow and for its bytes."""

    image: Image.Image
    stream: IO[bytes]
    size: int

    def tail(self) -> bytes:
        """Read the last bytes."""
        self.stream.seek(max(0, self.size - TAIL))
        return self.stream.read()

    def number(self, place: int, length: int = 4) -> int:
        """Read an unsigned big-endian number."""
        self.stream.seek(place)
        return int.from_bytes(self.stream.read(length), "big")


def check_end(image: Image.Image, path: Path) -> None:
    """Raise UsageError for an image file, opened by Pillow, that ends too early."""
    is_complete = _CHECKS.get(image.format or "")
    if is_complete is None:
        return
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not is_complete(_File(image, file, size)):
            what = f"is truncated or damaged: it does not end like a {image.format}"
            raise UsageError(path, what)


def _png(file: _File) -> bool:
    """PNG, third edition, 5.3: chunks of length, name, data and checksum; IEND is the
    last.
    """
    if file.tail().endswith(PNG_END):
        return True
    # Something may follow the last chunk.
    place = 8
    while place + 12 <= file.size:
        length = file.number(place)
        if file.stream.read(4) == b"IEND":
            return True
        place += 12 + length
    return False


def _jpeg(file: _File) -> bool:
    """ITU T.81, B.1: after the first start of scan (0xFFDA), 0xFFD9 is the end and
    stands for nothing else.
    """
    if file.tail().rstrip(b"\0\r\n ").endswith(JPEG_END):
        return True
    # Something may follow the end, as in the images of some phones.
    file.stream.seek(0)
    data = file.stream.read()
    place = 2
    while place + 4 <= file.size and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == JPEG_START_OF_SCAN:
            return JPEG_END in data[place:]
        if marker == 0xFF:  # a fill byte
            place += 1
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return False


def _gif(file: _File) -> bool:
    """GIF89a, 27: the trailer is 0x3B. A GIF does not say how many frames it has, so a
    truncated one looks shorter.
    """
    return file.tail().rstrip(b"\0\r\n").endswith(b";")


def _webp(file: _File) -> bool:
    """RFC 9649, 2.4: the size of the RIFF chunk follows its name."""
    file.stream.seek(4)
    return int.from_bytes(file.stream.read(4), "little") + 8 <= file.size


def _avif(file: _File) -> bool:
    """ISO/IEC 14496-12, 4.2: boxes follow each other, each with its length first."""
    place = 0
    while place + 8 <= file.size:
        length = file.number(place)
        if length == 1:
            length = file.number(place + 8, 8)
        if length == 0:  # to the end of the file
            return True
        place += max(length, 8)
    return place == file.size


def _bmp(file: _File) -> bool:
    """Rows of pixels without compression, of the length that Pillow found."""
    return all(
        offset + int(arguments[1]) * file.image.height <= file.size
        for codec, _, offset, arguments in getattr(file.image, "tile", ())
        if codec == "raw"
    )


def _ppm(file: _File) -> bool:
    """Rows of pixels without compression, each of whole bytes; the text formats pass."""
    row = (file.image.width * BITS.get(file.image.mode, 8) + 7) // 8
    return all(
        offset + row * file.image.height <= file.size
        for codec, _, offset, _ in getattr(file.image, "tile", ())
        if codec in ("raw", "ppm")
    )


def _tiff(file: _File) -> bool:
    """TIFF 6.0: StripOffsets 273 and StripByteCounts 279, TileOffsets 324 and
    TileByteCounts 325.
    """
    tags: Any = getattr(file.image, "tag_v2", {})
    for offsets, counts in ((273, 279), (324, 325)):
        parts = zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False)
        if any(offset + count > file.size for offset, count in parts):
            return False
    return True


Check = Callable[[_File], bool]
_CHECKS: MappingProxyType[str, Check] = MappingProxyType(
    {
        "AVIF": _avif,
        "BMP": _bmp,
        "GIF": _gif,
        "JPEG": _jpeg,
        "MPO": _jpeg,  # a JPEG with others behind it
        "PNG": _png,
        "PPM": _ppm,
        "TIFF": _tiff,
        "WEBP": _webp,
    }
)
