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
from dstrain.data import probe, read_frames, save_image_or_video, write_video
from dstrain.data.output import check_output, output_paths, side_by_side
from dstrain.data.videos import Pixels
from PIL import Image

from tests.support.videos import HEIGHT, WIDTH, frame, seconds, steady

NEAR = 0.02
"""Seconds by which a place may be wrong: half a pixel."""


def frames_of(pixels: Pixels, fps: float) -> Frames:
    """Pixels as a value."""
    return Frames(torch.from_numpy(pixels), fps)


@pytest.mark.parametrize(("name", "fps"), [("a.mp4", 16.0), ("A.MP4", 23.976)])
def test_a_video_that_is_written_is_read_back_at_its_rate(
    name: str, fps: float, tmp_path: Path
) -> None:
    path = tmp_path / "new" / name
    write_video(
        frames_of(np.stack([frame(time) for time in steady(17, fps)]), fps), path
    )
    video = probe(path)
    assert (video.frames, video.size) == (17, (HEIGHT, WIDTH))
    assert video.fps == pytest.approx(fps, rel=0.01)
    assert seconds(read_frames(path, range(17), None)) == pytest.approx(
        steady(17, fps), abs=NEAR
    )
    with av.open(str(path)) as file:
        assert (
            file.streams.video[0].codec.name,
            file.streams.video[0].pix_fmt,
        ) == ("h264", "yuv420p")


@pytest.mark.parametrize(
    ("name", "size", "fps", "count", "said"),
    [
        ("a.avi", (48, 64), 15.0, 2, ".avi is not a supported video format"),
        ("a.gif", (48, 64), 15.0, 2, ".gif is not a supported video format"),
        ("a", (48, 64), 15.0, 2, "no suffix is not a supported video format"),
        (
            "a.mp4",
            (47, 64),
            15.0,
            2,
            "47 x 64 (height x width): the sides of an mp4 must be even",
        ),
        (
            "a.mp4",
            (48, 64),
            0.0,
            2,
            "cannot be written: 2 frames at 0.0 frames per second",
        ),
        ("a.mp4", (48, 64), math.nan, 2, "cannot be written"),
        ("a.mp4", (48, 64), 15.0, 0, "cannot be written: 0 frames"),
    ],
)
def test_what_cannot_be_written_is_refused(
    name: str, size: tuple[int, int], fps: float, count: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        write_video(
            frames_of(np.zeros((count, *size, 3), np.uint8), fps), tmp_path / name
        )
    assert said in caught.value.what
    assert not (tmp_path / name).exists()


def spec(makes_video: bool, makes_layers: bool = False) -> Any:
    return SimpleNamespace(makes_video=makes_video, makes_layers=makes_layers)


def test_several_images_are_numbered_after_the_first_and_lie_side_by_side(
    tmp_path: Path,
) -> None:
    images = [Image.new("RGBA", (2, 1), colour) for colour in ("red", "lime", "blue")]
    path = tmp_path / "a.png"
    save_image_or_video(images, path)
    names = ["a.png", "a-1.png", "a-2.png"]
    assert output_paths(images, path) == [tmp_path / name for name in names]
    for name, image in zip(names, images, strict=True):
        with Image.open(tmp_path / name) as found:
            assert found.tobytes() == image.tobytes()
    whole = side_by_side(images)
    assert whole.size == (6, 1)
    assert whole.crop((2, 0, 4, 1)).tobytes() == images[1].tobytes()
    assert output_paths(images[0], path) == [path]


def test_layers_are_refused_in_a_format_without_transparent_parts(
    tmp_path: Path,
) -> None:
    check_output(tmp_path / "a.webp", spec(False, makes_layers=True))
    with pytest.raises(UsageError, match=r"JPEG has no transparent parts.*use \.png"):
        check_output(tmp_path / "a.jpg", spec(False, makes_layers=True))


@pytest.mark.parametrize(
    ("name", "makes_video"),
    [("a.png", False), ("a.JPG", False), ("a.webp", False), ("a.mp4", True)],
)
def test_a_format_of_what_is_generated_is_accepted(
    name: str, makes_video: bool, tmp_path: Path
) -> None:
    check_output(tmp_path / name, spec(makes_video))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "makes_video", "said"),
    [
        ("a.mp4", False, "--output: .*a.mp4: .mp4 is not a supported image format"),
        ("a", False, "no suffix is not a supported image format; use .png"),
        ("a.psd", False, ".psd is not a supported image format"),  # read, not written
        ("a.png", True, ".png is not a supported video format; use .mp4"),
        ("", False, "is a folder; give the name of a file"),
        ("", True, "is a folder; give the name of a file"),
    ],
)
def test_another_format_and_a_folder_are_refused(
    name: str, makes_video: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        check_output(tmp_path / name, spec(makes_video))


def test_an_image_and_a_video_are_saved_in_new_folders(tmp_path: Path) -> None:
    image = Image.fromarray(frame(0.5))
    save_image_or_video(image, tmp_path / "images/a.png")
    with Image.open(tmp_path / "images/a.png") as saved:
        assert np.array_equal(np.asarray(saved), np.asarray(image))
    pixels = np.stack([frame(time) for time in steady(5, 10)])
    save_image_or_video(frames_of(pixels, 10.0), tmp_path / "videos/a.mp4")
    assert probe(tmp_path / "videos/a.mp4").frames == 5
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("rate", [0.0, 15.0])
def test_a_failed_write_leaves_the_file_that_was_there(
    rate: float, tmp_path: Path
) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"before")
    frames = frames_of(np.zeros((2, 47 if rate else 48, 64, 3), np.uint8), rate)
    with pytest.raises(UsageError) as caught:
        save_image_or_video(frames, path)
    assert caught.value.where == str(path)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((SystemFault, OSError), match="file"):
        save_image_or_video(Image.new("RGB", (8, 8)), tmp_path / "file/a.png")
