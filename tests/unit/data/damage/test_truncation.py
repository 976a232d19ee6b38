"""Whether an image's file is whole follows from its end, whatever follows it, and
before anything is decoded.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import load_image, read_size
from PIL import Image

NOISE = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
)
KINDS: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "PNG": (NOISE, {}),
    "JPEG": (NOISE, {"quality": 90}),
    "JPEG progressive": (NOISE, {"progressive": True}),
    "MPO": (NOISE, {"save_all": True, "append_images": [NOISE]}),
    "GIF": (NOISE, {}),
    "WEBP": (NOISE, {"lossless": True}),
    "AVIF": (NOISE, {}),
    "BMP": (NOISE, {}),
    "BMP 1": (NOISE.convert("1"), {}),
    "PPM": (NOISE, {}),
    "PPM L": (NOISE.convert("L"), {}),
    "PPM 1": (NOISE.convert("1"), {}),
    "PPM I;16B": (Image.fromarray(np.full((40, 52), 40_000, np.uint16)), {}),
    "TIFF": (NOISE, {}),
    "TIFF strips": (NOISE, {"compression": "tiff_lzw", "strip_size": 512}),
    "PNG 1": (NOISE.convert("1"), {}),
}


def encoded(kind: str) -> bytes:
    image, options = KINDS[kind]
    content = io.BytesIO()
    image.save(content, kind.split()[0], **options)
    return content.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_accepted_also_with_something_behind_it(
    tmp_path: Path, kind: str
) -> None:
    content = encoded(kind)
    endings = (
        [b"", b"\0" * 8]
        if kind in ("GIF", "AVIF")
        else [b"", b"\0" * 8, b"more of it" * 20]
    )
    for more in endings:
        (tmp_path / "a").write_bytes(content + more)
        assert read_size(tmp_path / "a") == (40, 52)
        load_image(tmp_path / "a", "RGB", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused_before_it_is_decoded(
    tmp_path: Path, kind: str
) -> None:
    content = encoded(kind)
    if kind == "MPO":  # of several images the first is read
        content = content[: content.find(b"\xff\xd9", 1000) + 2]
    for length in range(1, len(content), max(1, len(content) // 25)):
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises(UsageError):
            read_size(tmp_path / "a")


def test_the_first_of_several_images_in_a_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(encoded("MPO")[:-20])
    assert read_size(tmp_path / "a") == (40, 52)


def test_what_follows_in_a_photograph_does_not_hide_that_it_is_cut(
    tmp_path: Path,
) -> None:
    content = encoded("JPEG")
    (tmp_path / "a").write_bytes(content[: len(content) // 2] + b"video" * 100)
    with pytest.raises(UsageError, match="does not end like a JPEG"):
        read_size(tmp_path / "a")


def test_a_jpeg_whose_scan_is_not_found_is_cut(tmp_path: Path) -> None:
    content = encoded("JPEG")
    scan = content.index(b"\xff\xda")
    # Pillow skips 0xFF00; as a segment its length is beyond the end.
    damaged = content[:scan] + b"\xff\x00" + content[scan:-20]
    (tmp_path / "a").write_bytes(damaged)
    with pytest.raises(UsageError, match="does not end like a JPEG"):
        read_size(tmp_path / "a")
