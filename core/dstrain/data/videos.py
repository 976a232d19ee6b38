"""Videos: the frames of a file and their times, known without decoding, and decoding.

A video is a video file, an animated image (GIF), a folder of images, or one image, which
is one frame.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dstrain.console import get_logger
from dstrain.data.images import (
    Size,
    convert,
    cover,
    frame_durations,
    is_image,
    load_image,
    read_size,
)
from dstrain.data.packets import DAMAGED, Packets, open_video, read_packets
from dstrain.data.variants import PLAIN, View
from dstrain.errors import UsageError
from dstrain.storage import file_mark
from dstrain.storage.hashing import FileMark

if TYPE_CHECKING:
    import av


logger = get_logger(__name__)
LOADER_VERSION = 3
"""Raised when `read_frames` returns other pixels for the same file, so that cached values
are not used for it.
"""
Pixels = NDArray[np.uint8]
"""(frames, height, width, 3), RGB."""


@dataclass(frozen=True)
class Video:
    """What is known of a video from its packets, or from the headers of its images."""

    path: str
    """A file or a folder of images."""
    size: Size
    """(height, width), upright."""
    timestamps: tuple[float, ...]
    """When each frame begins, in seconds from the first."""
    end: float
    """When the last frame ends, in seconds; 0 for a folder of images, which has no times."""
    marks: tuple[FileMark, ...]
    """The mark of the file when it was inspected, or of each of `files`."""
    files: tuple[str, ...] = ()
    """The image of each frame, if they have a file each."""

    @property
    def frames(self) -> int:
        """Return the number of frames, at least 1."""
        return len(self.timestamps)

    @property
    def fps(self) -> float:
        """Return the mean number of frames per second; 0 for images without times."""
        return self.frames / self.end if self.end else 0.0


def probe(path: Path) -> Video:
    """Inspect a video: read every packet and decode the first frame, no other.

    The frames are counted, since headers can be wrong. Raises UsageError for a file that
    is not a video or has no frame, and for one that holds less than its header says.
    """
    if path.is_dir():
        return _probe_folder(path)
    if is_image(path):
        return _probe_image(path)
    mark = file_mark(path)
    packets = read_packets(path)
    with open_video(path) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None or (packets.pts and frame.pts != packets.pts[0]):
            raise UsageError(path, f"{DAMAGED}: its first frame cannot be decoded")
        size = (frame.height, frame.width)
        if frame.rotation % 180:
            size = (frame.width, frame.height)
        if stream.metadata.get("alpha_mode") == "1":
            what = "has an alpha channel, which is not read: save it over a background"
            raise UsageError(path, what)
        if frame.color_trc in (16, 18):  # PQ and HLG
            _say_hdr(path.parent)
    return Video(str(path), size, packets.timestamps, packets.end, (mark,))


@cache
def _say_hdr(folder: Path) -> None:
    """Say once of a folder that videos in it are HDR."""
    logger.warning(
        f"{folder} has HDR videos (HLG or PQ); they are read as SDR, in pale colours: convert them first"
    )


def read_frames(
    path: Path, indices: Sequence[int], size: Size | None, view: View = PLAIN
) -> Pixels:
    """Decode the frames at `indices`, upright, over white, scaled to cover `size`
    (height, width) and cropped as `view` says; None keeps their size.

    Raises UsageError for a frame that the decoder does not return, or returns as damaged.
    """
    wanted = sorted(set(indices))
    pixels: dict[int, Pixels] = {}
    if is_image(path):
        for index in wanted:
            image = load_image(path, "RGB", size, index, view)
            pixels[index] = np.asarray(image)
    else:
        for index, image in _decode(path, wanted):
            pixels[index] = np.asarray(cover(image, size, view))
    return np.stack([pixels[index] for index in indices])


def frames_in(folder: Path) -> list[Path]:
    """Return the files of a folder of frames in the order of the numbers in their names,
    without hidden ones.
    """
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    return sorted(files, key=_numbers_first)


def _probe_folder(path: Path) -> Video:
    """Inspect the images of a folder of frames."""
    files = frames_in(path)
    if not files:
        raise UsageError(path, "is a folder without frames")
    marks = []
    sizes = []
    for file in files:
        if not file.is_file():
            what = "is not a file: a folder of frames may contain only images"
            raise UsageError(file, what)
        marks.append(file_mark(file))
        sizes.append(read_size(file))
    for file, (height, width) in zip(files, sizes, strict=True):
        if (height, width) != sizes[0]:
            what = f"is {height} x {width} (height x width), unlike {files[0].name}"
            raise UsageError(file, what)
    _check_numbers(files)
    names = tuple(map(str, files))
    return Video(str(path), sizes[0], (0.0,) * len(files), 0.0, tuple(marks), names)


def _check_numbers(files: Sequence[Path]) -> None:
    """Refuse a file that is named unlike most, frames of one number, a gap among steady
    numbers, and fractions of several lengths, whose order is not that of their digits.
    """
    shapes = [re.sub(r"-?\d+", "0", file.stem) for file in files]
    counts = Counter(shapes)
    usual = max(counts, key=lambda shape: (counts[shape], -len(shape)))
    for file, shape in zip(files, shapes, strict=True):
        is_odd = counts[shape] == 1 or "0" not in shape or usual in shape
        is_odd &= counts[shape] < counts[usual]
        if (is_odd or shape == f"{usual} (0)") and "0" in usual:
            raise UsageError(file, "is named unlike the others: it is no frame")
    fractions = [re.findall(r"\d\.(\d+)", file.stem) for file in files]
    if len({len(one) for found in fractions for one in found}) > 1:
        raise UsageError(files[0], "has a fraction shorter than others: fill them up")
    numbers = [[int(one) for one in re.findall(r"\d+", file.stem)] for file in files]
    differing = [one for one in zip(*numbers, strict=False) if len({*one}) > 1]
    if len(counts) > 1 or len(differing) > 1 or not any(numbers):
        return
    known = differing[0] if differing else [0] * len(files)
    steps = [after - before for before, after in pairwise(known)]
    least = min(steps, default=0)
    for (first, second), step in zip(pairwise(files), steps, strict=True):
        if not step:
            what = f"has the number of {first.name}: one of the two is no frame"
            raise UsageError(second, what)
        if 0 < 2 * least <= step:
            what = f"comes after {first.name}: frames between them are absent"
            raise UsageError(second, what)


def _numbers_first(path: Path) -> tuple[str, str]:
    """Return what sorts 2.png before 10.png; the whole name tells 01 from 1."""
    padded = re.sub(r"\d+", lambda number: number[0].zfill(30), path.name)
    return padded, path.name


def _probe_image(path: Path) -> Video:
    """Inspect an animated image; a still one is a folder of one frame."""
    mark = file_mark(path)
    size = read_size(path)
    durations = frame_durations(path)
    if len(durations) == 1:
        return Video(str(path), size, (0.0,), 0.0, (mark,), (str(path),))
    *starts, end = (np.cumsum([0, *durations]) / 1000).tolist()
    return Video(str(path), size, tuple(starts), end, (mark,))


def _decode(path: Path, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    """Decode the frames at `wanted` (rising), from the last key frame before them on.

    Each is known by its timestamp, so that a lost frame is never replaced by another.
    """
    packets = read_packets(path)
    starts: list[int | None] = [None]
    if packets.pts:
        first = packets.pts[0]
        target = packets.pts[wanted[0]]
        before = [key for key in packets.keys if first < key <= target]
        starts = [*before[-1:], None]
    missing = set(wanted)
    for start in starts:  # None: from the beginning, where seeking led too far
        with open_video(path) as (container, stream):
            if start is not None:
                container.seek(start, stream=stream)
            for index, frame in _numbered(container.decode(stream), packets, path):
                if index in missing and not frame.is_corrupt:
                    missing.remove(index)
                    yield index, _upright(frame)
                # Without timestamps all are decoded, to see that none is lost.
                if packets.pts and index >= wanted[-1]:
                    break
        if not missing:
            return
    what = f"frame {min(missing) + 1} of {len(packets.timestamps)} cannot be decoded"
    raise UsageError(path, f"{DAMAGED}: {what}")


def _numbered(
    decoded: Iterable["av.VideoFrame"], packets: Packets, path: Path
) -> Iterator[tuple[int, "av.VideoFrame"]]:
    """Yield each decoded frame with its index in the order shown."""
    if packets.pts:
        indices = {pts: index for index, pts in enumerate(packets.pts)}
        for frame in decoded:
            if frame.pts in indices:
                yield indices[frame.pts], frame
        return
    count = 0
    for frame in decoded:
        yield count, frame
        count += 1
    expected = len(packets.timestamps)
    if count < expected:
        what = f"only {count} of its {expected} frames can be decoded"
        raise UsageError(path, f"{DAMAGED}: {what}")


def _upright(frame: "av.VideoFrame") -> Image.Image:
    """Convert a frame to RGB, mirror it if it is to be shown so, and apply its rotation
    (counter-clockwise, in degrees).
    """
    has_alpha = any(component.is_alpha for component in frame.format.components)
    # One thread: those that scale would outlive the call, and a process forked later
    # would wait for them for ever.
    pixels = frame.to_ndarray(format="rgba" if has_alpha else "rgb24", threads=1)
    rotation = frame.rotation
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        # (a b . c d . . . .), of which the rotation is that of a and b alone.
        a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), np.int32).astype(float)
        if a * d < b * c:
            pixels, rotation = pixels[:, ::-1], rotation + 180
    turned = np.ascontiguousarray(np.rot90(pixels, round(rotation / 90)))
    return convert(Image.fromarray(turned), "RGB")
