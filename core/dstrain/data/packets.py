"""What the packets of a video file tell without decoding: how many frames there are,
and when each is shown.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import UsageError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream


FORMATS = "mov,matroska,avi"
"""FFmpeg's names of the containers that are read. Left out on purpose: play lists,
which open other files.
"""
MAX_FRAME_PIXELS = 2**26
"""Pixels of the largest frame that is decoded: twice those of 8K."""
CACHED_FILES = 64
"""Files whose packets a process remembers, since it reads several clips of one."""
MIN_DURATION_SHARE = 0.95
"""A Matroska file whose packets end before this part of the duration it tells is
half-written.
"""
DAMAGED = "is half-written or damaged"


@dataclass(frozen=True)
class Packets:
    """The frames of a file in the order shown.

    starts: when each begins, in seconds, the first at 0; end: when the last one ends.
    marks: their timestamps as in the file; () if those do not tell frames apart. keys:
    the marks of key frames, from which decoding can start.
    """

    timestamps: tuple[float, ...]
    end: float
    pts: tuple[int, ...]
    keys: tuple[int, ...]


def read_packets(path: Path) -> Packets:
    """Read every packet of a file; a file that did not change since is not read again.

    Raises UsageError for what is no video, and for a file that holds less than its
    header says.
    """
    stat = path.stat()
    if not stat.st_size:
        raise UsageError(str(path), "is empty: zero bytes")
    return _packets(str(path), stat.st_size, stat.st_mtime_ns)


@contextmanager
def open_video(
    path: Path, **options: str
) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open a file and choose its first video stream that is no cover picture; `options`
    are FFmpeg's.

    Raises UsageError, also in place of what FFmpeg raises inside the block.
    """
    import av
    from av.stream import Disposition

    # Opening decodes a frame where the container does not tell its kind of pixels, so
    # the limit is needed there too.
    limit = {"max_pixels": str(MAX_FRAME_PIXELS)}
    safe = {"format_whitelist": FORMATS, "protocol_whitelist": "file", **limit}
    try:
        container = av.open(
            str(path), options=safe | options, metadata_errors="replace"
        )
    except av.FFmpegError as error:
        what = "is no video of a kind that is read (mp4, mov, mkv, webm, avi, gif), or is half-written"
        raise UsageError(str(path), f"{what}: {error.strerror}") from error
    with container:
        streams = [
            stream
            for stream in container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            raise UsageError(str(path), "has no video stream")
        context = streams[0].codec_context
        if not 0 < context.width * context.height <= MAX_FRAME_PIXELS:
            what = (
                f"{DAMAGED}, or its frames have more than {MAX_FRAME_PIXELS:,} pixels"
            )
            raise UsageError(str(path), what)
        context.options = limit
        try:
            yield container, streams[0]
        except av.FFmpegError as error:
            raise UsageError(str(path), f"{DAMAGED}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Packet:
    mark: int | None
    duration: int
    is_key: bool
    is_shown: bool


@lru_cache(CACHED_FILES)
def _packets(name: str, size: int, changed: int) -> Packets:
    """See `read_packets`; size and time of change make a changed file another one."""
    with open_video(Path(name)) as (container, stream):
        found, last = _demuxed(container, stream)
        base, rate = stream.time_base or Fraction(1), float(stream.average_rate or 25)
        _check_length(name, container, last)
        expected = stream.frames
    if (
        len(found) < expected
    ):  # an edit list may cut frames away, and they count as well
        with open_video(Path(name), ignore_editlist="1") as (container, stream):
            there = len(_demuxed(container, stream)[0])
        if there < expected:
            what = (
                f"{there} of the {expected} frames that its header tells of are there"
            )
            raise UsageError(name, f"{DAMAGED}: {what}")
    return _in_order(name, [packet for packet in found if packet.is_shown], base, rate)


def _demuxed(
    container: "InputContainer", stream: "VideoStream"
) -> tuple[list[_Packet], float]:
    """The stream's packets as stored, without damaged and empty ones, and when the last
    of any stream ends.
    """
    found: list[_Packet] = []
    last = 0.0
    for packet in container.demux():
        if not packet.size:
            continue
        if packet.pts is not None and packet.time_base is not None:
            last = max(
                last, float((packet.pts + (packet.duration or 0)) * packet.time_base)
            )
        is_whole = not packet.is_corrupt and any(
            memoryview(packet)[:8]
        )  # zeros: space taken before it was filled
        if packet.stream.index == stream.index and is_whole:
            found.append(
                _Packet(
                    packet.pts,
                    packet.duration or 0,
                    packet.is_keyframe,
                    not packet.is_discard,
                )
            )
    return found, last


def _check_length(name: str, container: "InputContainer", last: float) -> None:
    """Refuse a Matroska file that is shorter than its header says; it does not say how
    many frames it has.
    """
    said = (container.duration or 0) / 1_000_000
    if "matroska" in container.format.name and last < MIN_DURATION_SHARE * said:
        what = f"it ends after {last:.2f} of the {said:.2f} seconds that its header tells of"
        raise UsageError(name, f"{DAMAGED}: {what}")


def _in_order(name: str, shown: list[_Packet], base: Fraction, rate: float) -> Packets:
    """Sort packets by when they are shown; without usable timestamps they are shown at
    the stream's own rate.
    """
    if not shown:
        raise UsageError(name, "has no frame")
    stamps: list[Any] = [packet.mark for packet in shown]
    if None in stamps or len(set(stamps)) < len(stamps):
        return Packets(
            tuple(number / rate for number in range(len(shown))),
            len(shown) / rate,
            (),
            (),
        )
    marks = tuple(sorted(stamps))
    starts = tuple(float((mark - marks[0]) * base) for mark in marks)
    keys = tuple(
        sorted(
            packet.mark for packet in shown if packet.is_key and packet.mark is not None
        )
    )
    final = next(packet.duration for packet in shown if packet.mark == marks[-1])
    usual = float(final * base) or (
        starts[-1] / (len(starts) - 1) if len(starts) > 1 else 1 / rate
    )
    return Packets(starts, starts[-1] + usual, marks, keys)
