"""Videos that tests make: a black bar on white, whose place tells the time at which a
frame was filmed.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import av
import numpy as np
from dstrain.data.videos import Pixels
from PIL import Image

HEIGHT, WIDTH = 48, 128
SPEED = 32.0
"""Pixels per second, so that a video of two seconds shows 64 places."""
BAR = 8
KEYS = MappingProxyType({"x264-params": "keyint=10:min-keyint=10:scenecut=0:bframes=3"})
"""Options of a file whose every tenth frame is a key frame."""


def frame(second: float, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Pixels:
    """The frame filmed at a time: (height, width, 3)."""
    pixels = np.full((*size, 3), 255, np.uint8)
    left = round(second * SPEED)
    pixels[:, left : left + BAR] = 0
    return pixels


def seconds(pixels: Pixels, turned: bool = False) -> list[float]:
    """When each frame (frames, height, width, 3) was filmed; `turned` for frames whose
    bar moves upwards.
    """
    dark = pixels[..., 0].mean(axis=2 if turned else 1) < 128
    places = [np.flatnonzero(line[::-1] if turned else line) for line in dark]
    return [
        float(place.mean() - (BAR - 1) / 2) / SPEED if place.size else float("nan")
        for place in places
    ]


def film(
    path: Path,
    times: Iterable[float],
    fps: float = 30,
    *,
    codec: str = "libx264",
    size: tuple[int, int] = (HEIGHT, WIDTH),
    form: str = "yuv420p",
    rotation: int = 0,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
) -> Path:
    """Write what happened at `times`, each frame shown at its own time (variable frame
    rate, in milliseconds).
    """
    with av.open(str(path), "w", options=dict(container or {})) as file:
        stream = file.add_stream(codec, Fraction(fps), options=dict(options or {}))
        stream.height, stream.width, stream.pix_fmt = (*size, form)
        stream.codec_context.time_base = stream.time_base = (
            Fraction(1, 1000) if codec != "mpeg4" else 1 / Fraction(fps)
        )
        if rotation:
            stream.set_display_rotation(rotation)
        for time in times:
            image = av.VideoFrame.from_ndarray(frame(time, size), format="rgb24")
            image.time_base = stream.codec_context.time_base
            image.pts = round(time / image.time_base)
            file.mux(stream.encode(image))
        file.mux(stream.encode(None))
    return path


def lose_frame(path: Path, number: int, kept: float = 0.0) -> None:
    """Overwrite a frame of a file, by its number in the order shown, but for a part at
    its beginning: a decoder makes one of that, and calls it damaged.
    """
    with av.open(str(path)) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
        places = {one.pts: (one.pos, one.size) for one in packets}
    position, size = places[sorted(places)[number]]
    assert position is not None
    content = bytearray(path.read_bytes())
    start = position + max(4, int(size * kept))
    filling = b"\x55" if kept else b"\xff"
    content[start : position + size] = filling * (position + size - start)
    path.write_bytes(content)


def steady(count: int, fps: float) -> list[float]:
    """The times of `count` frames at a constant rate."""
    return [number / fps for number in range(count)]


def gif(
    path: Path, shown: Sequence[int], size: tuple[int, int] = (HEIGHT, WIDTH)
) -> Path:
    """Write a GIF whose frames are shown for these many milliseconds each, filmed when
    they come up.
    """
    starts = np.cumsum([0, *shown])[:-1] / 1000
    first, *others = [Image.fromarray(frame(start, size)) for start in starts]
    first.save(path, save_all=True, append_images=others, duration=list(shown))
    return path


def folder(path: Path, times: Sequence[float], names: Sequence[str] = ()) -> Path:
    path.mkdir()
    for number, time in enumerate(times):
        Image.fromarray(frame(time)).save(
            path / (names[number] if names else f"{number}.png")
        )
    return path
