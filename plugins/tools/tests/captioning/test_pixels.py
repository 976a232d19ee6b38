"""The model is shown what training reads: upright, over white, not larger than asked."""

from pathlib import Path

import numpy as np
import pytest
from dstrain import UsageError
from dstrain_tools.captioning.folder import Task
from dstrain_tools.captioning.pixels import evenly, load
from PIL import Image

from tests.support.videos import film, seconds, steady


def task(path: Path, is_video: bool = False) -> Task:
    return Task(path.name, path, path.with_suffix(".txt"), is_video)


def test_transparent_parts_are_white_and_the_image_is_upright(tmp_path: Path) -> None:
    image = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.png", exif=exif)
    (shown,) = load(task(tmp_path / "a.png"), 10_000, 8)
    assert (shown.mode, shown.size) == ("RGB", (20, 40))
    assert shown.getextrema() == ((255, 255),) * 3


def test_large_images_are_scaled_down_to_the_limit(tmp_path: Path) -> None:
    Image.new("RGB", (400, 100)).save(tmp_path / "a.jpg")
    (shown,) = load(task(tmp_path / "a.jpg"), 10_000, 8)
    assert shown.size == (200, 50)
    (same,) = load(task(tmp_path / "a.jpg"), 40_000, 8)
    assert same.size == (400, 100)


def test_of_a_video_evenly_spaced_frames_share_the_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    film(path, steady(30, 10))
    shown = load(task(path, is_video=True), 4 * 24 * 64, 4)
    assert {image.size for image in shown} == {(64, 24)}
    large = load(task(path, is_video=True), 10**8, 4)
    times = seconds(np.stack([np.asarray(image) for image in large]))
    assert times == pytest.approx([0.3, 1.1, 1.8, 2.6], abs=0.15)


@pytest.mark.parametrize(
    ("total", "count", "frames"),
    ((1, 8, [0]), (3, 8, [0, 1, 2]), (100, 4, [12, 37, 62, 87])),
)
def test_frames_are_from_the_middle_of_equal_parts(
    total: int, count: int, frames: list[int]
) -> None:
    assert evenly(total, count) == frames


def test_a_broken_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UsageError):
        load(task(tmp_path / "a.png"), 10_000, 8)
