"""Which frames of a video make a sample: frames per second first, then how many, then
where they start.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from statistics import median

from dstrain.config.schema import SamplingMode
from dstrain.errors import UsageError

TIE = 1e-4
"""Seconds. Two frames as near as this to the time wanted are equally near, and the
earlier one is taken.
"""


@dataclass(frozen=True)
class FrameSampling:
    """The samples made from each video: clips of `frames` frames.

    sampling: head takes the first frames; chunk cuts the video into consecutive clips and drops the rest; uniform takes
    `samples` clips whose starts are evenly spaced.
    """

    frames: int = 81
    sampling: SamplingMode = "head"
    samples: int = 1

    def check(self, stride: int) -> None:
        """Raise UsageError if the number of frames is not a multiple of `stride`, plus
        one; 0 allows any.
        """
        if stride and (self.frames - 1) % stride:
            near = round((self.frames - 1) / stride) * stride + 1
            raise UsageError(
                "--num_frames",
                f"{self.frames} is not {stride}n+1; the nearest is {near}",
            )

    def clips(self, total: int, stride: int) -> tuple[range, ...]:
        """Return the clips of a video of `total` frames (at least 1): one or more
        ranges of equal length.

        A video with fewer frames than wanted gives one clip: the most of its first frames that are a multiple of
        `stride`, plus one.
        """
        wanted = self.frames
        if total < wanted:
            return (range((total - 1) // stride * stride + 1 if stride else total),)
        if self.sampling == "chunk":
            starts = [number * wanted for number in range(total // wanted)]
        elif self.sampling == "uniform" and self.samples > 1:
            starts = [
                number * (total - wanted) // (self.samples - 1)
                for number in range(self.samples)
            ]
        else:
            starts = [0]
        return tuple(range(start, start + wanted) for start in dict.fromkeys(starts))


def frames_at_rate(starts: Sequence[float], end: float, fps: float) -> tuple[int, ...]:
    """Return the frames that show a video at `fps` frames per second: for each i, the
    one nearest to time i / fps.

    starts: when each frame begins, in seconds, rising, the first at 0. end: when the
    last one ends. A frame that stays longer than usual counts until half a usual
    (median) interval before the next begins, so that a still moment stays as long as it
    was; between frames of a constant rate that is the nearest one.
    """
    lead = (
        median(after - before for before, after in pairwise(starts)) / 2
        if starts[1:]
        else 0.0
    )
    count = max(1, floor(end * fps + 0.5))
    return tuple(
        max(0, bisect_right(starts, number / fps + lead - TIE) - 1)
        for number in range(count)
    )
