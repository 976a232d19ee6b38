"""Choose the frames of a video that make a sample: the frame rate, then the clips."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from statistics import median

from dstrain.config.options import SamplingMode
from dstrain.errors import UsageError

TIE = 1e-4
"""Seconds; frames that are equally near to a moment up to this give the earlier one."""


@dataclass(frozen=True)
class FrameSampling:
    """How videos are cut into clips."""

    frames: int = 81
    """Frames of a clip, of several numbers the most."""
    sampling: SamplingMode = "head"
    """head: one clip of the first frames. chunk: consecutive clips, without the rest.
    uniform: `samples` clips that start at evenly spaced frames.
    """
    samples: int = 1
    shorter: tuple[int, ...] = ()
    """Fewer frames, rising: a video with fewer than `frames` gives clips of the most that
    it has."""

    def check(self, stride: int) -> None:
        """Raise UsageError unless each number of frames is a multiple of `stride`, plus 1.

        A stride of 0 allows any number.
        """
        if not stride:
            return
        for frames in (*self.shorter, self.frames):
            if (frames - 1) % stride:
                near = round((frames - 1) / stride) * stride + 1
                what = f"{frames} is not {stride}n+1; the nearest is {near}"
                raise UsageError("--num_frames", what)

    def clips(self, total: int, stride: int) -> tuple[range, ...]:
        """Return the clips of a video of `total` frames (at least 1), of equal length: the
        greatest for which it has enough frames.

        A video that is too short for any gives one clip: as many of its first frames as
        make a multiple of `stride`, plus 1.
        """
        fitting = [one for one in (*self.shorter, self.frames) if one <= total]
        if not fitting:
            usable = (total - 1) // stride * stride + 1 if stride else total
            return (range(usable),)
        frames = fitting[-1]
        last = total - frames
        starts = [0]
        if self.sampling == "chunk":
            starts = list(range(0, last + 1, frames))
        elif self.sampling == "uniform" and self.samples > 1:
            starts = [i * last // (self.samples - 1) for i in range(self.samples)]
        return tuple(range(start, start + frames) for start in dict.fromkeys(starts))


def frames_at_rate(
    timestamps: Sequence[float], end: float, fps: float
) -> tuple[int, ...]:
    """Return the frames that show a video at `fps`: for each i, the one at time i / fps.

    A frame counts until half a usual (median) interval before the next one begins. At a
    constant rate that is the nearest frame, and a still moment stays as long as it was.

    Args:
        timestamps: When each frame begins, in seconds, rising from 0.
        end: When the last frame ends, in seconds.
        fps: Frames per second wanted.
    """
    lead = 0.0
    if len(timestamps) > 1:
        lead = median(after - before for before, after in pairwise(timestamps)) / 2
    count = max(1, floor(end * fps + 0.5))
    moments = (i / fps + lead - TIE for i in range(count))
    return tuple(max(0, bisect_right(timestamps, moment) - 1) for moment in moments)
