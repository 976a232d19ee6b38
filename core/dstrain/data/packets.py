"""Packets of a video file: they tell how many frames there are and when each is shown,
without decoding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dstrain.data.faults import check_readable, raise_system_fault
from dstrain.errors import UsageError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream


FORMATS = "mov,matroska,avi"
"""FFmpeg's names of the containers that are opened. Left out on purpose: play lists, which
open other files.
"""
MAX_FRAME_PIXELS = 2**26
"""Pixels of the largest frame that is decoded: twice those of 8K."""
CACHED_FILES = 64
"""Files whose packets a process remembers, since it reads several clips of one."""
MIN_DURATION_SHARE = 0.95
"""A Matroska file that ends before this share of the duration in its header is truncated,
even if it does not say how long it is.
"""
DAMAGED = "is truncated or damaged"


@dataclass(frozen=True)
class Packets:
    """The frames of a video file in the order they are shown."""

    timestamps: tuple[float, ...]
    """When each frame begins, in seconds from the first."""
    end: float
    """When the last frame ends, in seconds."""
    pts: tuple[int, ...]
    """Their timestamps as in the file; () if those do not tell frames apart."""
    keys: tuple[int, ...]
    """The pts of key frames, from which decoding can start."""


def read_packets(path: Path) -> Packets:
    """Read every packet of a file, once as long as the file does not change.

    Raises UsageError for a file that is not a video, and for one that holds less than
    its header says.
    """
    stat = path.stat()
    if not stat.st_size:
        raise UsageError(path, "is empty")
    return _packets(path, stat.st_size, stat.st_mtime_ns)


def check_pyav(path: Path) -> None:
    """Raise UsageError if PyAV, which the extra `core[video]` brings, is not installed."""
    if find_spec("av") is None:
        raise UsageError(path, "videos need the package av", "run: pip install av")


@contextmanager
def open_video(
    path: Path, **options: str
) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open a file and its first video stream that is not a cover image.

    `options` are FFmpeg's. Raises UsageError, also in place of what FFmpeg raises inside
    the block.
    """
    check_pyav(path)
    import av
    from av.stream import Disposition

    # Opening decodes a frame where the container does not name its kind of pixels, so
    # the limit is needed here, too.
    limit = {"max_pixels": str(MAX_FRAME_PIXELS)}
    options |= {"format_whitelist": FORMATS, "protocol_whitelist": "file"} | limit
    try:
        container = av.open(str(path), options=options, metadata_errors="replace")
    except av.FFmpegError as error:
        raise_system_fault(path, error)
        check_readable(path)
        what = "is not a video in a supported format (mp4, mov, mkv, webm, avi, gif), or is truncated"
        raise UsageError(path, f"{what}: {error.strerror}") from error
    with container:
        streams = [
            stream
            for stream in container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            raise UsageError(path, "has no video stream")
        # A file that is cut off may not say how it is coded.
        context: Any = streams[0].codec_context
        if (
            context is None
            or not 0 < context.width * context.height <= MAX_FRAME_PIXELS
        ):
            what = (
                f"{DAMAGED}, or its frames have more than {MAX_FRAME_PIXELS:,} pixels"
            )
            raise UsageError(path, what)
        context.options = limit
        try:
            yield container, streams[0]
        except av.FFmpegError as error:
            raise_system_fault(path, error)
            check_readable(path)
            raise UsageError(path, f"{DAMAGED}: {error.strerror}") from error


class _Packet(NamedTuple):
    """What is kept of a packet, whose data would fill the memory."""

    pts: int | None
    duration: int
    is_key: bool


# Size and time of change are part of the cache's key: a changed file is read again.
@lru_cache(CACHED_FILES)
def _packets(path: Path, size: int, changed: int) -> Packets:
    with open_video(path) as (container, stream):
        count, shown, seconds = _read_all(container, stream)
        expected = stream.frames
        time_base = stream.time_base or Fraction(1)
        rate = float(stream.average_rate or 25)
        if "mp4" in container.format.name and _mp4_ends_early(path):
            raise UsageError(path, f"{DAMAGED}: its last part is not whole")
        if "matroska" in container.format.name:  # whose header does not count frames
            wanted = (container.duration or 0) / 1_000_000
            if seconds < MIN_DURATION_SHARE * wanted:
                what = f"it ends after {seconds:.2f} of the {wanted:.2f} seconds in its header"
                raise UsageError(path, f"{DAMAGED}: {what}")
    if count < expected:
        # An edit list may cut frames away, and the header counts them as well.
        with open_video(path, ignore_editlist="1") as (container, stream):
            count, _, _ = _read_all(container, stream)
        if count < expected:
            what = f"only {count} of the {expected} frames in its header are present"
            raise UsageError(path, f"{DAMAGED}: {what}")
    if not shown:
        raise UsageError(path, "has no frames")
    return _in_order(shown, time_base, rate)


def _mp4_ends_early(path: Path) -> bool:
    """Return whether a box of an MP4 or MOV file ends beyond the file, or the last one is
    the index of a fragment without its frames (ISO/IEC 14496-12).
    """
    length, at, kind = path.stat().st_size, 0, b""
    with path.open("rb") as file:
        while at < length:
            file.seek(at)
            size, kind = int.from_bytes(file.read(4)), file.read(4)
            if size == 1:
                size = int.from_bytes(file.read(8))
            if not size:
                return False  # to the end of the file
            at += max(size, 8)
    # Cameras append what is no box.
    boxes = (b"mdat", b"mfra", b"moof", b"moov", b"sidx", b"styp")
    is_box = any(known.startswith(kind) for known in boxes)
    return kind == b"moof" or (at > length and is_box)


def _read_all(
    container: "InputContainer", stream: "VideoStream"
) -> tuple[int, list[_Packet], float]:
    """Return the number of the stream's packets, without damaged and empty ones; those
    of them that are shown, as stored; and when the last packet of any stream ends, in
    seconds.
    """
    count = 0
    shown: list[_Packet] = []
    end = 0.0
    for packet in container.demux():
        if not packet.size:
            continue
        pts, duration = packet.pts, packet.duration or 0
        if pts is not None and packet.time_base is not None:
            end = max(end, float((pts + duration) * packet.time_base))
        # Space that was reserved and never written is all zeros.
        written = any(memoryview(packet)[:8])
        if packet.stream.index == stream.index and written and not packet.is_corrupt:
            count += 1
            if not packet.is_discard:
                shown.append(_Packet(pts, duration, packet.is_keyframe))
    return count, shown, end


def _in_order(shown: list[_Packet], time_base: Fraction, rate: float) -> Packets:
    """Sort packets by when they are shown; without usable timestamps, at a steady rate."""
    by_pts = {packet.pts: packet for packet in shown if packet.pts is not None}
    count = len(shown)
    if len(by_pts) < count:
        steady = tuple(number / rate for number in range(count))
        return Packets(steady, count / rate, (), ())
    pts = tuple(sorted(by_pts))
    timestamps = tuple(float((one - pts[0]) * time_base) for one in pts)
    keys = tuple(one for one in pts if by_pts[one].is_key)
    last = float(by_pts[pts[-1]].duration * time_base)
    if not last:  # unknown: the mean of the others
        last = timestamps[-1] / (count - 1) if count > 1 else 1 / rate
    return Packets(timestamps, timestamps[-1] + last, pts, keys)
