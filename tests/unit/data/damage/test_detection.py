"""Damage that Pillow does not report is found by checksums and by FFmpeg; no sound image
is refused.
"""

import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import StateError, SystemFault, UsageError
from dstrain.data.damage import detection
from dstrain.data.damage.detection import check_content, check_unchanged
from dstrain.storage import file_mark
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, (120, 168, 3), dtype=np.uint8)
NOISE = Image.fromarray(PIXELS)
FLAT = Image.new("RGB", (640, 480), "white")
SMOOTH = NOISE.resize((16, 12)).resize((800, 600), Image.Resampling.BICUBIC)
IMAGES = {
    "noise": NOISE,
    "flat": FLAT,
    "smooth": SMOOTH,
    "odd": NOISE.crop((0, 0, 33, 47)),
}
KINDS: dict[str, dict[str, Any]] = {
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


def jpeg(image: Image.Image, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "JPEG", **options)
    return content.getvalue()


def check(tmp_path: Path, content: bytes, form: str = "JPEG") -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    check_content(path, form)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_jpeg_is_accepted(kind: str, image: str, tmp_path: Path) -> None:
    check(tmp_path, jpeg(IMAGES[image], **KINDS[kind]))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_sound_jpeg_of_other_colours_is_accepted(
    mode: str, progressive: bool, tmp_path: Path
) -> None:
    check(tmp_path, jpeg(SMOOTH.convert(mode), progressive=progressive))


def test_what_surrounds_the_pixels_of_a_jpeg_does_not_matter(tmp_path: Path) -> None:
    content = jpeg(NOISE, exif=b"Exif\0\0" + jpeg(NOISE.resize((64, 64))))
    for behind in (bytes(100), b"video" * 10_000, content):
        check(tmp_path, content + behind)
    for padding in (b"\xff\xff\xff", bytes(1), bytes(50)):
        check(tmp_path, content[:-2] + padding + content[-2:])
    check(tmp_path, jpeg(NOISE).replace(b"\xff\xda", b"\xff\xff\xff\xda"))


def test_a_kind_of_jpeg_that_ffmpeg_does_not_know_is_left_to_pillow(
    tmp_path: Path,
) -> None:
    content = bytearray(jpeg(NOISE))
    content[content.index(b"\xff\xc0") + 1] = 0xC9  # arithmetic coding
    check(tmp_path, bytes(content))


def test_a_jpeg_whose_second_half_is_zeros_is_damaged(tmp_path: Path) -> None:
    content = jpeg(NOISE)
    half = len(content) // 2
    with pytest.raises(UsageError, match="image: is damaged: its JPEG data has more"):
        check(tmp_path, content[:half] + bytes(half - 2) + content[-2:])


def test_a_jpeg_with_codes_that_do_not_exist_is_damaged(tmp_path: Path) -> None:
    content = bytearray(jpeg(NOISE))
    draw = random.Random(0)
    for _ in range(40):
        content[draw.randrange(len(content) // 2, len(content) - 2)] ^= 0x55
    with pytest.raises(UsageError, match="is damaged: its JPEG data is invalid"):
        check(tmp_path, bytes(content))


def test_a_jpeg_without_an_end_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is damaged"):
        check(tmp_path, jpeg(NOISE)[:-2])


def test_a_jpeg_that_is_too_large_to_be_read_at_once_is_left_to_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "MAX_BYTES", 100)
    check(tmp_path, jpeg(NOISE)[:-2])


def test_without_pyav_a_jpeg_is_left_to_pillow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "find_spec", lambda name: None)
    check(tmp_path, jpeg(NOISE)[:-2])


def test_every_checksum_of_a_png_is_compared(tmp_path: Path) -> None:
    NOISE.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    check(tmp_path, content, "PNG")
    check(tmp_path, content + b"more", "PNG")
    for place in range(40, len(content) - 12, len(content) // 50):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises((SyntaxError, OSError)):
            check(tmp_path, bytes(changed), "PNG")


@pytest.mark.parametrize("form", ["BMP", "WEBP", None])
def test_other_formats_have_nothing_to_ask(form: str | None, tmp_path: Path) -> None:
    check_content(tmp_path / "missing", form)


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"abc")
    mark = file_mark(path)
    check_unchanged(path, mark)
    path.chmod(0o600)
    check_unchanged(path, mark)
    os.utime(path, ns=(1, 1))
    with pytest.raises(StateError, match=r"a\.png: changed after the run"):
        check_unchanged(path, mark)
    path.write_bytes(b"abcd")
    os.utime(path, ns=(mark[1], mark[1]))
    with pytest.raises(StateError, match="leave a dataset as it is"):
        check_unchanged(path, mark)


def test_a_file_that_is_gone_is_for_others_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_unchanged(tmp_path / "a.png", [1, 1, 1, 1])

    def fail(path: Path) -> Any:
        raise OSError(errno.ESTALE, "injected")

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(SystemFault, match="injected"):
        check_unchanged(tmp_path / "a.png", [1, 1, 1, 1])
