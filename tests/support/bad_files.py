"""Files that are not what they should be, as bytes: halves, damage, and files that are
larger than they look.
"""

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    """An image as the bytes of a file."""
    content = io.BytesIO()
    (image or Image.fromarray(NOISE)).save(content, kind, **options)
    return content.getvalue()


def part(content: bytes, share: float = 0.5) -> bytes:
    return content[: int(len(content) * share)]


def cut(kind: str, **options: Any) -> bytes:
    """The first half of an image's file."""
    return part(encoded(kind, **options))


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return (
        struct.pack(">I", len(data))
        + name
        + data
        + struct.pack(">I", zlib.crc32(name + data))
    )


def huge_png() -> bytes:
    """A PNG whose header tells of 2^32 pixels, and which has none."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 65536, 65536, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def hurt(content: bytes, place: float = 0.5) -> bytes:
    """A file with 16 bytes overwritten in the middle."""
    at = int(len(content) * place)
    return content[:at] + b"\xff\xd7" * 8 + content[at + 16 :]


def film(frames: int = 12, size: int = 32, form: str = "mp4") -> bytes:
    content = io.BytesIO()
    with av.open(content, "w", format=form) as file:
        stream = file.add_stream("libx264", Fraction(15))
        stream.height, stream.width, stream.pix_fmt = size, size, "yuv420p"
        for number in range(frames):
            pixels = np.random.default_rng(number).integers(
                0, 256, (size, size, 3), dtype=np.uint8
            )
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
    return content.getvalue()


def sound() -> bytes:
    """A file of half a second of silence, without images."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000, layout="mono")
        for _ in range(8):
            silence = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            silence.sample_rate = 16000
            file.mux(stream.encode(silence))
        file.mux(stream.encode(None))
    return content.getvalue()


def frames(
    *sizes: int, more: Callable[[Path], Any] | None = None
) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        path.mkdir()
        for number, size in enumerate(sizes):
            Image.new("RGB", (size, 32)).save(path / f"{number}.png")
        if more:
            more(path)

    return make


def zeros(width: int, height: int) -> bytes:
    """A grey PNG, black, of a thousandth of its size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    packer = zlib.compressobj(1)
    rows = b"\0" * (1 + width) * 100
    data = (
        b"".join(packer.compress(rows) for _ in range(height // 100)) + packer.flush()
    )
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_text(size: int) -> bytes:
    """A PNG with a compressed text of so many bytes."""
    whole = encoded("PNG", Image.new("RGB", (32, 32)))
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * size))
    return whole[:33] + text * 3 + whole[33:]


def moving_png(frames: int) -> bytes:
    """A PNG whose header tells of so many frames of 4,000 x 4,000."""
    whole = encoded("PNG", Image.new("L", (4000, 4000)))
    control = struct.pack(">IIIIIHHBB", 0, 4000, 4000, 0, 0, 1, 25, 0, 0)
    return (
        whole[:33]
        + chunk(b"acTL", struct.pack(">II", frames, 0))
        + chunk(b"fcTL", control)
        + whole[33:]
    )


def moving_gif(side: int, frames: int) -> bytes:
    """A GIF whose screen is of this size, and whose every frame is one pixel."""
    head = (
        b"GIF89a"
        + struct.pack("<HHBBB", side, side, 0x80, 0, 0)
        + b"\0\0\0\xff\xff\xff"
    )
    one = b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + one * frames + b";"


def pages(count: int) -> bytes:
    """A TIFF of many pages of 64 x 64 grey pixels, all of them in one place."""
    pixels, place = b"\x80" * 4096, 8 + 4096
    tags = (
        (256, 64),
        (257, 64),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 1),
        (278, 64),
        (279, 4096),
    )
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    size = 2 + len(entries) + 4
    ends = [place + size * (number + 1) for number in range(count - 1)] + [0]
    content = b"".join(
        struct.pack("<H", len(tags)) + entries + struct.pack("<I", end) for end in ends
    )
    return struct.pack("<2sHI", b"II", 42, place) + pixels + content


def huge_tiff() -> bytes:
    """A TIFF whose header tells of 2^40 pixels in one strip."""
    content = encoded("TIFF", Image.new("L", (64, 64)))
    for tag in (256, 257):
        entry = struct.pack("<HHI", tag, 4, 1)
        at = content.find(entry)
        if at < 0:
            entry = struct.pack("<HHI", tag, 3, 1)
            at = content.find(entry)
        content = (
            content[:at] + struct.pack("<HHII", tag, 4, 1, 2**20) + content[at + 12 :]
        )
    return content


def huge_webp() -> bytes:
    """A WebP whose header tells of 16,384 x 16,384 pixels of animation."""
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    content = bytearray(encoded("WEBP", first, save_all=True, append_images=[second]))
    content[24:30] = (2**14 - 1).to_bytes(3, "little") * 2
    return bytes(content)


def huge_film() -> bytes:
    """A video whose container tells of 64 x 64 pixels, and whose frames have 16,000 x
    16,000.
    """
    content, frame = io.BytesIO(), zeros(16_000, 16_000)
    with av.open(content, "w", format="mov") as file:
        stream = file.add_stream("png", Fraction(15))
        stream.width = stream.height = 64
        stream.pix_fmt = "rgb24"
        for number in range(2):
            packet = av.Packet(frame)
            packet.stream, packet.pts, packet.dts = stream, number, number
            packet.time_base, packet.is_keyframe = Fraction(1, 15), True
            file.mux(packet)
    return content.getvalue()
