"""What the packets of a file tell: what is not whole, or no video, is named before
anything is decoded.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import packets, probe, read_frames
from PIL import Image

from tests.support.videos import KEYS, film, folder, gif, seconds, steady


def refused(path: Path) -> str:
    """What is wrong with a file."""
    with pytest.raises(UsageError) as caught:
        probe(path)
    return f"{caught.value.where}: {caught.value.what}"


FAST = {"movflags": "faststart"}


def whole(path: Path) -> bytes:
    codec = "libvpx-vp9" if path.suffix == ".webm" else "libx264"
    container = FAST if path.suffix == ".mp4" else {}
    return film(
        path, steady(60, 30), 30, codec=codec, container=container, options={"g": "10"}
    ).read_bytes()


@pytest.mark.parametrize("part", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("ending", ["cut off", "zeros"])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm"])
def test_a_half_written_file_is_named_as_such(
    suffix: str, ending: str, part: float, tmp_path: Path
) -> None:
    path = tmp_path / f"half{suffix}"
    content = whole(path)
    cut = content[: int(len(content) * part)]
    path.write_bytes(cut if ending == "cut off" else cut.ljust(len(content), b"\0"))
    assert f"half{suffix}: is truncated or damaged" in refused(path)


@pytest.mark.parametrize("missing", [0.05, 0.02, 0.001])
@pytest.mark.parametrize("suffix", [".mkv", ".webm"])
def test_a_matroska_file_without_its_last_bytes_is_no_shorter_video(
    suffix: str, missing: float, tmp_path: Path
) -> None:
    path = tmp_path / f"short{suffix}"
    content = whole(path)
    path.write_bytes(content[: int(len(content) * (1 - missing))])
    assert "is truncated or damaged: it is shorter than its header" in refused(path)


def test_a_recording_that_does_not_say_how_long_it_is_is_accepted(
    tmp_path: Path,
) -> None:
    path = film(tmp_path / "a.mkv", steady(60, 30), 30, container={"live": "1"})
    assert probe(path).frames == 60
    content = path.read_bytes()
    path.write_bytes(content[:-200])  # in the middle of its last cluster
    assert "is truncated or damaged" in refused(path)


def test_what_follows_a_matroska_file_does_not_matter(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mkv", steady(60, 30), 30)
    path.write_bytes(path.read_bytes() + b"\xff" * 20)
    assert probe(path).frames == 60


def test_a_half_written_gif_is_named_as_such(tmp_path: Path) -> None:
    path = gif(tmp_path / "half.gif", [40] * 20)
    content = path.read_bytes()
    for part in (0.3, 0.6, 0.95):
        path.write_bytes(content[: int(len(content) * part)])
        assert "truncated" in refused(path)


def test_a_file_whose_index_was_never_written_is_refused(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", steady(30, 15), 15)
    path.write_bytes(path.read_bytes()[:-600])
    assert "truncated" in refused(path)


def test_a_file_that_begins_between_key_frames_is_refused(tmp_path: Path) -> None:
    whole, headless = (
        film(tmp_path / "a.mp4", steady(30, 15), 15, options=KEYS),
        tmp_path / "headless.mkv",
    )
    with av.open(str(whole)) as source, av.open(str(headless), "w") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in [packet for packet in source.demux(video=0) if packet.size][4:]:
            packet.stream = stream
            file.mux(packet)
    assert "its first frame cannot be decoded" in refused(headless)


def trimmed(path: Path) -> Path:
    """A file of 60 frames of which an edit list shows half a second, as phones trim."""
    content = bytearray(film(path, steady(60, 30), 30, container=FAST).read_bytes())
    place = content.index(b"elst") + 12
    duration, start, _ = struct.unpack(">Iii", content[place : place + 12])
    content[place : place + 8] = struct.pack(">Ii", duration // 4, start + 16000)
    path.write_bytes(content)
    return path


def test_what_an_edit_list_cuts_away_is_neither_shown_nor_missed(
    tmp_path: Path,
) -> None:
    path = trimmed(tmp_path / "a.mp4")
    times = seconds(read_frames(path, range(probe(path).frames), None))
    assert times == pytest.approx([1 + number / 30 for number in range(15)], abs=0.04)


def playlist(path: Path) -> None:
    film(path.parent / "a.mp4", steady(3, 15), 15)
    path.write_text("#EXTM3U\n#EXTINF:1,\na.mp4\n")


def sound(path: Path) -> None:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", 44100)
        samples = av.AudioFrame.from_ndarray(
            np.zeros((2, 1024), np.float32), format="fltp", layout="stereo"
        )
        samples.sample_rate = 44100
        file.mux([*stream.encode(samples), *stream.encode(None)])


def mixed_sizes(path: Path) -> None:
    folder(path, steady(3, 10))
    Image.new("RGB", (9, 7)).save(path / "2.png")


NO_VIDEOS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.mp4": (lambda path: path.touch(), "is empty"),
    "text.mp4": (
        lambda path: path.write_text("hello"),
        "is not a video in a supported format",
    ),
    "list.m3u8": (playlist, "is not a video in a supported format"),
    "sound.mp4": (sound, "has no video stream"),
    "bare": (lambda path: path.mkdir(), "is a folder without frames"),
    "mixed": (mixed_sizes, r"2.png: is 7 x 9 (height x width), unlike 0.png"),
    "text": (
        lambda path: (folder(path, [0.0]) / "notes.txt").write_text("x"),
        "notes.txt: is not an image in a supported",
    ),
    "deep": (
        lambda path: (folder(path, [0.0]) / "deeper").mkdir(),
        "deeper: is not a file",
    ),
}


@pytest.mark.parametrize("name", NO_VIDEOS)
def test_what_is_no_video_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    make, said = NO_VIDEOS[name]
    make(tmp_path / name)
    assert said in refused(tmp_path / name)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", steady(5, 15), 15)
    assert probe(path).frames == 5
    film(path, steady(9, 15), 15)
    assert probe(path).frames == 9


def test_videos_without_pyav_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught, packets.open_video(tmp_path / "a.mp4"):
        pass
    assert "videos need the package av\n  run: pip install av" in str(caught.value)
