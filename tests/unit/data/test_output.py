"""Images and videos are written whole, in the format of their name, or refused."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from dstrain import Frames, SystemFault, UsageError
from dstrain.data import probe, read_frames
from dstrain.data.output import check_output, save_image_or_video, write_video
from PIL import Image

from tests.support.videos import HEIGHT, WIDTH, frame, seconds, steady

NEAR = 0.02
"""Seconds by which a place may be wrong: half a pixel."""
IMAGES = SimpleNamespace(makes_video=False, makes_layers=False)
LAYERS = SimpleNamespace(makes_video=False, makes_layers=True)
VIDEOS = SimpleNamespace(makes_video=True, makes_layers=False)


def filmed(count: int, fps: float) -> Frames:
    """A video of so many frames."""
    pixels = np.stack([frame(time) for time in steady(count, fps)])
    return Frames(torch.from_numpy(pixels), fps)


def black(count: int, size: tuple[int, int], fps: float) -> Frames:
    return Frames(torch.zeros((count, *size, 3), dtype=torch.uint8), fps)


@pytest.mark.parametrize(("name", "fps"), [("a.mp4", 16.0), ("A.MP4", 23.976)])
def test_a_video_that_is_written_is_read_back_at_its_rate(
    name: str, fps: float, tmp_path: Path
) -> None:
    path = tmp_path / "new" / name
    write_video(filmed(17, fps), path)
    video = probe(path)
    assert (video.frames, video.size) == (17, (HEIGHT, WIDTH))
    assert video.fps == pytest.approx(fps, rel=0.01)
    times = seconds(read_frames(path, range(17), None))
    assert times == pytest.approx(steady(17, fps), abs=NEAR)
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert (stream.codec.name, stream.pix_fmt) == ("h264", "yuv420p")


@pytest.mark.parametrize(
    ("name", "frames", "named"),
    [
        ("a.avi", black(2, (48, 64), 15.0), ".avi"),
        ("a.gif", black(2, (48, 64), 15.0), ".gif"),
        ("a", black(2, (48, 64), 15.0), ".mp4"),
        ("a.mp4", black(2, (47, 64), 15.0), "47 x 64"),
        ("a.mp4", black(2, (48, 63), 15.0), "48 x 63"),
        ("a.mp4", black(2, (48, 64), 0.0), "0.0"),
        ("a.mp4", black(2, (48, 64), math.nan), "nan"),
        ("a.mp4", black(0, (48, 64), 15.0), "0"),
    ],
)
def test_what_cannot_be_written_is_refused_and_the_file_that_was_there_stays(
    name: str, frames: Frames, named: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with pytest.raises(UsageError) as caught:
        save_image_or_video(frames, path)
    assert caught.value.where == str(path)
    assert named in caught.value.what
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_several_images_are_numbered_after_the_first(tmp_path: Path) -> None:
    images = [Image.new("RGBA", (2, 1), colour) for colour in ("red", "lime", "blue")]
    save_image_or_video(images, tmp_path / "a.png", {"prompt": "a dog"})
    for name, image in zip(("a.png", "a-1.png", "a-2.png"), images, strict=True):
        with Image.open(tmp_path / name) as found:
            assert found.tobytes() == image.tobytes()
            assert found.info["prompt"] == "a dog"


@pytest.mark.parametrize(
    ("good", "bad", "spec"),
    [
        ("a.png", "a.mp4", IMAGES),
        ("a.JPG", "a", IMAGES),
        ("a.webp", "a.psd", IMAGES),  # read, not written
        ("a.mp4", "a.png", VIDEOS),
        ("a.webp", "a.jpg", LAYERS),
        *(("a.png", "", IMAGES), ("a.mp4", "", VIDEOS)),
    ],
)
def test_a_format_of_what_is_generated_is_accepted_and_no_other(
    good: str, bad: str, spec: Any, tmp_path: Path
) -> None:
    check_output(tmp_path / good, spec)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        check_output(tmp_path / bad, spec)
    assert str(tmp_path / bad) in f"{caught.value.where}{caught.value.what}"


def test_an_image_and_a_video_are_saved_in_new_folders(tmp_path: Path) -> None:
    image = Image.fromarray(frame(0.5))
    save_image_or_video(image, tmp_path / "images/a.PNG", {"prompt": "a \udcff dog"})
    with Image.open(tmp_path / "images/a.PNG") as saved:
        assert np.array_equal(np.asarray(saved), np.asarray(image))
        assert saved.info["prompt"] == "a ? dog"
    save_image_or_video(filmed(5, 10.0), tmp_path / "videos/a.mp4")
    assert probe(tmp_path / "videos/a.mp4").frames == 5
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["a.mp4"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFault) as caught:
        save_image_or_video(Image.new("RGB", (8, 8)), tmp_path / "file/a.png")
    assert caught.value.where == str(tmp_path / "file/a.png")
