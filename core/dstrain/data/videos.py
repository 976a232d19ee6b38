"""Videos: what frames a file has and when they are shown, told without decoding;
decoding those asked for; writing.

A video is a video file, an animated picture (GIF), a folder of pictures, or one
picture, which is one frame.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dstrain.data.images import (
    convert,
    cover,
    frame_durations,
    is_image,
    load_image,
    read_size,
)
from dstrain.data.packets import DAMAGED, Packets, open_video, read_packets
from dstrain.errors import UsageError

if TYPE_CHECKING:
    import av


LOADER_VERSION = 2
"""Raised when `read_frames` returns other pixels for the same file, so that stored
results are not used for it.
"""
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Video:
    """A video as told by its packets, or by the headers of its pictures.

    size: (height, width) upright. starts: when each frame begins, in seconds, the first
    at 0; end: when the last one ends. files: the pictures, one per frame, if they have
    a file each; they have no times of their own, so `end` is 0.
    """

    size: tuple[int, int]
    timestamps: tuple[float, ...]
    end: float
    files: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        """How many frames there are; at least 1."""
        return len(self.timestamps)

    @property
    def fps(self) -> float:
        """Frames per second, the mean over the video; 0 for pictures without times."""
        return self.frames / self.end if self.end else 0.0


def probe(path: Path) -> Video:
    """Tell what a video holds: every packet of a file is read and its first frame
    decoded, none else.

    The number of frames is counted, not read from the header. Raises UsageError for
    what is no video or has no frame, and for a file that holds less than its header
    says.
    """
    if path.is_dir():
        return _folder(path)
    if is_image(path):
        return _images(path)
    packets = read_packets(path)
    with open_video(path) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None or (packets.pts and frame.pts != packets.pts[0]):
            raise UsageError(str(path), f"{DAMAGED}: its first frame cannot be decoded")
        sideways = frame.rotation % 180 != 0
        size = (frame.width, frame.height) if sideways else (frame.height, frame.width)
    return Video(size, packets.timestamps, packets.end)


def read_frames(
    path: Path, indices: Sequence[int], size: tuple[int, int] | None
) -> Pixels:
    """Decode the frames at `indices` of a file: (frames, height, width, 3), RGB,
    upright, over white.

    Each is scaled to cover `size` (height, width) and cropped about its centre; None
    leaves it. Only what lies between the last key frame before the first and the last
    of them is decoded. Raises UsageError for a frame that the decoder does not return,
    or returns as damaged.
    """
    wanted = sorted(set(indices))
    found = _animated(path, wanted) if is_image(path) else _decoded(path, wanted)
    pixels = {index: np.asarray(cover(image, size)) for index, image in found}
    return np.stack([pixels[index] for index in indices])


def read_images(paths: Sequence[Path], size: tuple[int, int] | None) -> Pixels:
    """Load pictures as frames, as `read_frames` does."""
    return np.stack([np.asarray(load_image(path, "RGB", size)) for path in paths])


def _folder(path: Path) -> Video:
    """The pictures of a folder in the order of the numbers in their names; hidden files
    are left out.
    """
    files = sorted(
        (file for file in path.iterdir() if not file.name.startswith(".")), key=_natural
    )
    if not files:
        raise UsageError(str(path), "is a folder without frames")
    sizes = [read_size(file) if file.is_file() else _no_image(file) for file in files]
    for file, size in zip(files, sizes, strict=True):
        if size != sizes[0]:
            first = f"{sizes[0][0]} x {sizes[0][1]} of {files[0].name}"
            raise UsageError(
                str(path),
                f"{file.name} is {size[0]} x {size[1]} (height x width), not {first}",
            )
    return Video(sizes[0], (0.0,) * len(files), 0.0, tuple(str(file) for file in files))


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path.name)
    ]
    return [*parts, (-1, path.name)]  # 01 and 1 are different names


def _no_image(file: Path) -> tuple[int, int]:
    raise UsageError(str(file), "is no file: a folder of frames holds pictures alone")


def _images(path: Path) -> Video:
    """A GIF, or another animated picture; a still one is a folder of one."""
    size, shown = read_size(path), frame_durations(path)
    if len(shown) == 1:
        return Video(size, (0.0,), 0.0, (str(path),))
    ends = np.cumsum(shown).tolist()
    return Video(size, (0.0, *(end / 1000 for end in ends[:-1])), ends[-1] / 1000)


def _animated(path: Path, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    for index in wanted:
        yield index, load_image(path, "RGB", None, index)


def _decoded(path: Path, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    """Decode the frames at `wanted` (rising); each is known by its timestamp, so a lost
    one is never another.
    """
    packets = read_packets(path)
    keys = [
        key for key in packets.keys if packets.pts[0] < key <= packets.pts[wanted[0]]
    ]
    missing = set(wanted)
    for seek in (*keys[-1:], None):  # from the start again where seeking led too far
        with open_video(path) as (container, stream):
            if seek is not None:
                container.seek(seek, stream=stream)
            for index, frame in _numbered(container.decode(stream), packets, path):
                if index in missing and not frame.is_corrupt:
                    missing.remove(index)
                    yield index, _upright(frame)
                if packets.pts and index >= wanted[-1]:
                    break
        if not missing:
            return
    raise UsageError(
        str(path),
        f"{DAMAGED}: frame {min(missing) + 1} of {len(packets.timestamps)} cannot be decoded",
    )


def _numbered(
    decoded: Iterable["av.VideoFrame"], packets: Packets, path: Path
) -> Iterator[tuple[int, "av.VideoFrame"]]:
    """Each decoded frame with its place in the order shown."""
    if packets.pts:
        places = {mark: place for place, mark in enumerate(packets.pts)}
        yield from (
            (places[frame.pts], frame) for frame in decoded if frame.pts in places
        )
        return
    count = 0
    for frame in decoded:
        yield count, frame
        count += 1
    if count < len(packets.timestamps):
        what = f"{count} of the {len(packets.timestamps)} frames that its header tells of can be decoded"
        raise UsageError(str(path), f"{DAMAGED}: {what}")


def _upright(frame: "av.VideoFrame") -> Image.Image:
    """Convert a decoded frame and apply the rotation that goes with it
    (counter-clockwise, in degrees).
    """
    has_alpha = any(component.is_alpha for component in frame.format.components)
    # One thread: those that scale would outlive the call, and a process forked later
    # would wait for them for ever.
    pixels = frame.to_ndarray(format="rgba" if has_alpha else "rgb24", threads=1)
    turned = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
    return convert(Image.fromarray(turned), "RGB")
