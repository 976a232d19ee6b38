"""What is not whole, or no video, is named, and is never taken for a shorter one."""

import struct
import sys
from pathlib import Path

import av
import pytest
from dstrain import UsageError
from dstrain.data import probe, read_frames

from tests.support.videos import KEYS, film, gif, seconds, steady

FAST = {"movflags": "faststart"}


def refused(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        probe(path)
    return caught.value


def whole(path: Path) -> bytes:
    if path.suffix == ".gif":
        return gif(path, [40] * 20).read_bytes()
    codec = "libvpx-vp9" if path.suffix == ".webm" else "libx264"
    container = FAST if path.suffix == ".mp4" else {}
    options = {"g": "10"}
    film(path, steady(60, 30), 30, codec=codec, container=container, options=options)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".webm", ".gif"])
def test_a_half_written_file_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"half{suffix}"
    content = whole(path)
    for part in (0.5, 0.7, 0.85):
        cut = content[: int(len(content) * part)]
        for half in (cut, cut.ljust(len(content), b"\0")):
            path.write_bytes(half)
            assert refused(path).where == str(path)


def test_an_mp4_of_fragments_that_is_cut_is_no_shorter_video(tmp_path: Path) -> None:
    """Between two fragments it is whole, as a recording that was ended."""
    fragments = {"movflags": "frag_every_frame+empty_moov+default_base_moof"}
    whole = film(tmp_path / "a.mp4", steady(9, 15), 15, container=fragments)
    content = whole.read_bytes()
    count = len(probe(whole).timestamps)
    path, accepted = tmp_path / "b.mp4", set()
    for end in range(len(content) - 600, len(content), 7):
        path.write_bytes(content[:end])
        try:
            accepted.add(end if len(probe(path).timestamps) < count else 0)
        except UsageError:
            continue
    ends = {content.index(b"moof", at) - 4 for at in accepted - {0}}
    assert accepted - {0} <= ends


def test_what_cameras_append_to_an_mp4_does_not_matter(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", steady(9, 15), 15)
    content = path.read_bytes()
    for tail in (bytes(64), b"trailer of a camera"):
        path.write_bytes(content + tail)
        assert probe(path).frames == 9


def test_a_recording_without_a_length_is_accepted(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mkv", steady(60, 30), 30, container={"live": "1"})
    assert probe(path).frames == 60


def test_a_file_that_begins_between_key_frames_is_refused(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", steady(30, 15), 15, options=KEYS)
    headless = tmp_path / "headless.mkv"
    with av.open(str(path)) as source, av.open(str(headless), "w") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in [packet for packet in source.demux(video=0) if packet.size][4:]:
            packet.stream = stream
            file.mux(packet)
    refused(headless)


def test_what_an_edit_list_cuts_is_neither_shown_nor_missed(tmp_path: Path) -> None:
    """Of 60 frames half a second is shown, as phones trim."""
    path = film(tmp_path / "a.mp4", steady(60, 30), 30, container=FAST)
    content = bytearray(path.read_bytes())
    place = content.index(b"elst") + 12
    duration, start, _ = struct.unpack(">Iii", content[place : place + 12])
    content[place : place + 8] = struct.pack(">Ii", duration // 4, start + 16000)
    path.write_bytes(content)
    times = seconds(read_frames(path, range(probe(path).frames), None))
    assert times == pytest.approx([1 + number / 30 for number in range(15)], abs=0.04)


def test_videos_without_pyav_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = film(tmp_path / "a.mp4", steady(3, 15), 15)
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install av" in str(refused(path))
