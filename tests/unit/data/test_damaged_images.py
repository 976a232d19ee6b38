"""An image file that is cut or damaged is refused, and no sound one is: its end shows
whether it is whole, before anything is decoded; checksums and FFmpeg find the rest.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import load_image, read_size
from PIL import Image

from tests.support.bad_files import encoded
from tests.support.noise_images import noise_image, smooth_noise

SMALL = noise_image(52, 40)
NOISE = noise_image(168, 120)
END = b"\xff\xd9"
"""Of a JPEG."""
KINDS: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "PNG": (SMALL, {}),
    "JPEG": (SMALL, {"quality": 90}),
    "JPEG progressive": (SMALL, {"progressive": True}),
    "MPO": (SMALL, {"save_all": True, "append_images": [SMALL]}),
    "GIF": (SMALL, {}),
    "WEBP": (SMALL, {"lossless": True}),
    "AVIF": (SMALL, {}),
    "BMP": (SMALL, {}),
    "BMP 1": (SMALL.convert("1"), {}),
    "PPM": (SMALL, {}),
    "PPM L": (SMALL.convert("L"), {}),
    "PPM 1": (SMALL.convert("1"), {}),
    "PPM I;16B": (Image.fromarray(np.full((40, 52), 40_000, np.uint16)), {}),
    "TIFF": (SMALL, {}),
    "TIFF strips": (SMALL, {"compression": "tiff_lzw", "strip_size": 512}),
    "PNG 1": (SMALL.convert("1"), {}),
}


def written(kind: str) -> bytes:
    image, options = KINDS[kind]
    return encoded(kind.split()[0], image, **options)


def load(folder: Path, content: bytes) -> Image.Image:
    """Load an image with these bytes."""
    (folder / "a").write_bytes(content)
    return load_image(folder / "a", "RGB", None)


def refused(folder: Path, content: bytes) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(folder, content)
    assert caught.value.where == str(folder / "a")
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_accepted_also_with_something_behind_it(
    tmp_path: Path, kind: str
) -> None:
    content = written(kind)
    endings = [b"", b"\0" * 8, b"more of it" * 20]
    for more in endings[: 2 if kind in ("GIF", "AVIF") else 3]:
        assert load(tmp_path, content + more).size == (52, 40)
        assert read_size(tmp_path / "a") == (40, 52)
    tiny = encoded(kind.split()[0], Image.new(KINDS[kind][0].mode, (1, 1)))
    load(tmp_path, tiny)
    assert read_size(tmp_path / "a") == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused_before_it_is_decoded(
    tmp_path: Path, kind: str
) -> None:
    content = written(kind)
    if kind == "MPO":
        # Of several images the first is read.
        (tmp_path / "a").write_bytes(content[:-20])
        assert read_size(tmp_path / "a") == (40, 52)
        content = content[: content.find(END, 1000) + 2]
    for length in range(1, len(content), max(1, len(content) // 25)):
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises(UsageError):
            read_size(tmp_path / "a")


def test_what_follows_in_a_photograph_does_not_hide_that_it_is_cut(
    tmp_path: Path,
) -> None:
    content = written("JPEG")
    scan = content.index(b"\xff\xda")
    cut = content[: len(content) // 2] + b"video" * 100
    # Pillow skips 0xFF00; as a segment its length is beyond the end.
    without_scan = content[:scan] + b"\xff\x00" + content[scan:-20]
    for damaged in (cut, without_scan):
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(UsageError, match="JPEG"):
            read_size(tmp_path / "a")


JPEGS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "best": {"quality": 100, "subsampling": 0},
    "worst": {"quality": 1},
    "optimized": {"optimize": True},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 4},
    "progressive, restart markers": {"restart_marker_rows": 1, "progressive": True},
    "RGB": {"keep_rgb": True},
    "comment": {"comment": b"\xff\xd9" * 40},
}


@pytest.mark.parametrize("kind", JPEGS)
def test_a_sound_jpeg_is_accepted(kind: str, tmp_path: Path) -> None:
    smooth = smooth_noise(800, 600)
    flat = Image.new("RGB", (640, 480), "white")
    for image in (NOISE, flat, smooth, NOISE.crop((0, 0, 33, 47))):
        assert load(tmp_path, encoded("JPEG", image, **JPEGS[kind])).size == image.size
    if "subsampling" not in JPEGS[kind] and kind != "RGB":
        for mode in ("L", "CMYK"):
            load(tmp_path, encoded("JPEG", smooth.convert(mode), **JPEGS[kind]))


def test_what_surrounds_the_pixels_of_a_jpeg_does_not_matter(tmp_path: Path) -> None:
    thumbnail = encoded("JPEG", NOISE.resize((64, 64)))
    content = encoded("JPEG", NOISE, exif=b"Exif\0\0" + thumbnail)
    for behind in (bytes(100), b"video" * 10_000, content):
        load(tmp_path, content + behind)
    for padding in (b"\xff\xff\xff", bytes(1), bytes(50)):
        load(tmp_path, content[:-2] + padding + content[-2:])
    plain = encoded("JPEG", NOISE)
    load(tmp_path, plain.replace(b"\xff\xda", b"\xff\xff\xff\xda"))


def test_a_jpeg_with_zeros_codes_that_do_not_exist_or_without_an_end_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded("JPEG", NOISE, **JPEGS["comment"])
    half = len(content) // 2
    zeros = content[:half] + bytes(half - 2) + content[-2:]
    changed = bytearray(content)
    draw = random.Random(0)
    for _ in range(40):
        changed[draw.randrange(half, len(content) - 2)] ^= 0x55
    for damaged in (content[:-2], bytes(changed), zeros):
        assert "JPEG" in refused(tmp_path, damaged).what
    # Pillow itself does not notice.
    load_image(tmp_path / "a", "RGB", None, check=False)
    monkeypatch.setitem(sys.modules, "av", None)
    load(tmp_path, zeros)


def test_every_checksum_of_a_png_is_compared(tmp_path: Path) -> None:
    content = encoded("PNG", NOISE)
    load(tmp_path, content + b"more")
    for place in range(40, len(content) - 12, len(content) // 50):
        changed = bytearray(content)
        changed[place] ^= 1
        refused(tmp_path, bytes(changed))
