"""Videos are read at the times their frames were filmed."""

import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import probe, read_frames
from dstrain.data.clips import frames_at_rate
from PIL import Image

from tests.support.videos import (
    HEIGHT,
    KEYS,
    WIDTH,
    film,
    folder,
    frame,
    gif,
    lose_frame,
    seconds,
    steady,
)

NEAR = 0.02
"""Seconds by which a place may be wrong: half a pixel."""


def shown(path: Path, fps: float) -> list[float]:
    """When each frame was filmed that shows a video at `fps`."""
    video = probe(path)
    frames = frames_at_rate(video.timestamps, video.end, fps)
    return seconds(read_frames(path, frames, None))


CONTAINERS: dict[str, Callable[[Path], Path]] = {
    "60.mp4": lambda path: film(path, steady(120, 60), 60),
    "15.mp4": lambda path: film(path, steady(30, 15), 15),
    "30.webm": lambda path: film(path, steady(60, 30), 30, codec="libvpx-vp9"),
    "30.mkv": lambda path: film(path, steady(60, 30), 30),
    "15.mov": lambda path: film(path, steady(30, 15), 15),
    "15.avi": lambda path: film(path, steady(30, 15), 15, codec="mpeg4"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_rate_and_container_has_one_motion(name: str, tmp_path: Path) -> None:
    path = CONTAINERS[name](tmp_path / name)
    assert shown(path, 15) == pytest.approx(steady(30, 15), abs=NEAR)
    video = probe(path)
    rate = int(name[:2])
    assert (video.size, video.frames) == ((HEIGHT, WIDTH), 2 * rate)
    assert video.fps == pytest.approx(rate, rel=0.01)


def test_a_variable_rate_shows_each_frame_for_its_time(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.6]
    found = shown(film(tmp_path / "v.mp4", times), 10)
    moments = [number / 10 + 0.05 for number in range(16)]
    expected = [max(time for time in times if time <= moment) for moment in moments]
    assert found[:16] == pytest.approx(expected, abs=NEAR)
    assert found[-1] == pytest.approx(1.6, abs=NEAR)


@pytest.mark.parametrize(
    ("rotation", "turned"), [(90, True), (-90, True), (180, False)]
)
def test_rotation_is_applied(rotation: int, turned: bool, tmp_path: Path) -> None:
    path = film(tmp_path / "r.mp4", steady(10, 15), 15, rotation=rotation)
    assert probe(path).size == ((WIDTH, HEIGHT) if turned else (HEIGHT, WIDTH))
    upright = read_frames(path, range(10), None)
    assert upright.shape[1:3] == probe(path).size
    as_filmed = np.stack([np.rot90(image, -rotation // 90) for image in upright])
    assert seconds(as_filmed) == pytest.approx(steady(10, 15), abs=NEAR)


@pytest.mark.parametrize(
    ("matrix", "axes"),
    [((-1, 0, 0, 1), (slice(None), slice(None, None, -1))), ((1, 0, 0, -1), (slice(None, None, -1),))],
)  # fmt: skip
def test_a_video_that_is_shown_mirrored_is_read_mirrored(
    matrix: tuple[int, ...], axes: tuple[slice, ...], tmp_path: Path
) -> None:
    path = film(tmp_path / "m.mp4", steady(3, 15), 15)
    plain = read_frames(path, range(3), None)
    content = bytearray(path.read_bytes())
    a, b, c, d = (one << 16 for one in matrix)
    at = content.index(b"tkhd") + 44
    struct.pack_into(">9i", content, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    assert np.array_equal(read_frames(path, range(3), None), plain[:, *axes])


def test_colours_that_would_not_be_those_of_a_viewer_are_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alpha = {"codec": "libvpx-vp9", "form": "yuva420p"}
    with pytest.raises(UsageError):
        probe(film(tmp_path / "a.webm", steady(3, 15), 15, **alpha))
    hdr = {"x264-params": "transfer=arib-std-b67"}
    for name in ("b.mp4", "c.mp4"):
        probe(film(tmp_path / name, steady(3, 15), 15, options=hdr))
    assert len([one for one in caplog.messages if "HDR" in one]) == 1


def test_a_gif_follows_its_uneven_durations(tmp_path: Path) -> None:
    path = gif(tmp_path / "a.gif", [100, 300, 100, 500])
    video = probe(path)
    assert (video.timestamps, video.end) == ((0.0, 0.1, 0.4, 0.5), 1.0)
    wanted = [0, 0.1, 0.1, 0.1, 0.4, *[0.5] * 5]
    assert shown(path, 10) == pytest.approx(wanted, abs=NEAR)
    # What is too fast to be shown is slow, as in browsers.
    first, *others = [Image.fromarray(frame(time)) for time in (0.0, 0.4, 0.8, 1.2)]
    times = {"duration": [0, 10, 20, 30], "append_images": others}
    first.save(tmp_path / "b.gif", save_all=True, **times)
    assert probe(tmp_path / "b.gif").timestamps == (0.0, 0.1, 0.2, 0.22)


@pytest.mark.parametrize("suffix", [".webp", ".png"])
def test_other_moving_images_are_read_as_gifs_are(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    first, *others = [Image.fromarray(frame(time)) for time in (0.0, 0.1, 0.4)]
    options = {"duration": [100, 300, 100], "lossless": True}
    first.save(path, save_all=True, append_images=others, **options)
    assert probe(path).timestamps == (0.0, 0.1, 0.4)
    assert shown(path, 10) == pytest.approx([0, 0.1, 0.1, 0.1, 0.4], abs=NEAR)


@pytest.mark.parametrize(
    ("names", "is_whole"),
    [
        (("1", "2", "4"), False),
        (("1", "001", "2"), False),
        (("f 2", "f 4", "f 6"), True),
        (("7",), True),
        (("a", "b"), True),
        (("1 x2", "2 x2", "3 x2"), True),
        (("1 x2", "2 x2", "4 x2"), False),
        (("t0.25", "t1.00", "t2.50"), True),
        (("0", "33", "67", "100"), True),
        (("1", "2", "cover"), False),
        (("1", "2", "2 (1)"), False),
        (("1", "1 (1)", "2", "2 (1)"), False),
        (("1", "2", "3", "3 (1)", "4", "4 (1)", "5"), False),
        (("1", "2", "3", "cover", "thumb"), False),
        (("a1", "a2", "b1", "b2"), True),
        (("a1", "a2", "a3", "b1", "b2"), True),
        (("a1", "a2", "a3", "b1"), False),
        (("1", "2", "3", "Copy of 1", "Copy of 2"), False),
        (("0.0", "0.5", "0.10", "0.15"), False),
        (("shot", "shot (1)", "shot (2)"), False),
        (("-001", "000", "001"), True),
        (("1", "2", "02", "3"), False),
        (("t0.0", "t0.25", "t0.5"), False),
        (tuple(f"shot.{number}" for number in range(8, 12)), True),
    ],
)
def test_frames_have_steady_numbers(
    names: tuple[str, ...], is_whole: bool, tmp_path: Path
) -> None:
    for name in names:
        Image.fromarray(frame(0.0)).save(tmp_path / f"{name}.png")
    if is_whole:
        assert probe(tmp_path).frames == len(names)
        return
    with pytest.raises(UsageError) as caught:
        probe(tmp_path)
    assert caught.value.where in {str(tmp_path / f"{name}.png") for name in names}


def test_a_folder_is_read_in_the_order_of_its_numbers_and_has_no_rate_of_its_own(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path / "frames", steady(12, 10))
    (path / ".hidden").touch()
    video = probe(path)
    names = [Path(file).name for file in video.files]
    assert names == [f"{number}.png" for number in range(12)]
    assert (video.frames, video.fps, video.size) == (12, 0, (HEIGHT, WIDTH))


def test_transparent_parts_are_shown_over_white(tmp_path: Path) -> None:
    path = tmp_path / "a.mov"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("qtrle", 15)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "argb"
        pixels = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
        pixels[:, : WIDTH // 2, 3] = 255
        file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")))
        file.mux(stream.encode(None))
    (image,) = read_frames(path, [0], None)
    assert image[:, : WIDTH // 2].max() == 0
    assert image[:, WIDTH // 2 :].min() == 255


def test_frames_are_scaled_and_cropped_about_their_centre(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", steady(3, 15), 15)
    pixels = read_frames(path, [1], (24, 32))
    assert pixels.shape == (1, 24, 32, 3)
    whole = Image.fromarray(read_frames(path, [1], None)[0])
    half = whole.resize((WIDTH // 2, HEIGHT // 2), Image.Resampling.LANCZOS)
    cut = np.asarray(half.crop((16, 0, 48, 24))).astype(int)
    assert np.abs(cut - pixels[0]).max() <= 2


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm", "a.avi", "a.gif"])
def test_any_frames_in_any_order_are_of_the_whole(name: str, tmp_path: Path) -> None:
    path, codecs = tmp_path / name, {".webm": "libvpx-vp9", ".avi": "mpeg4"}
    if path.suffix == ".gif":
        gif(path, [40] * 50)
    else:
        codec = codecs.get(path.suffix, "libx264")
        options = KEYS if codec == "libx264" else {"g": "10"}
        film(path, steady(50, 25), 25, codec=codec, options=options)
    whole = read_frames(path, range(50), None)
    assert len(whole) == 50
    several = [[23, 24, 25], [31, 30], [8, 8, 8], [44, 3], [19, 20, 21]]
    for indices in ([49], [0], [10], [9], *several):
        assert np.array_equal(read_frames(path, indices, None), whole[indices])


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_frame_lost_in_the_middle_is_named_and_no_other_takes_its_place(
    tmp_path: Path, kept: float
) -> None:
    """Also where the decoder makes something of what is left of it."""
    path = film(tmp_path / "a.mp4", steady(40, 25), 25, options=KEYS)
    lose_frame(path, 20, kept)
    assert probe(path).frames == 40
    assert len(read_frames(path, range(10), None)) == 10
    with pytest.raises(UsageError) as caught:
        read_frames(path, range(10, 30), None)
    assert caught.value.where == str(path)
    if kept:
        assert " 21 of 40 " in caught.value.what
        assert len(read_frames(path, [19, 35], None)) == 2
