"""Aspect buckets: the few sizes at which images of all aspect ratios are loaded."""

import math
from dataclasses import dataclass

from dstrain.errors import UsageError

STEPS = 16
"""Steps in the side of a bucket's square, where no option says how long a step is."""
Size = tuple[int, int]
"""(height, width) in pixels."""


class TooSmall(ValueError):
    """An image is too small for all buckets."""


@dataclass(frozen=True)
class Buckets:
    """The sizes of one area: both sides are multiples of a step."""

    side: int
    """Side in pixels of the square whose area no bucket exceeds."""
    step: int | None = None
    """Pixels; None for a sixteenth of the side. Sides are also multiples of what the
    model asks for."""
    least: int | None = None
    """Least side; None for half of `side`."""
    greatest: int | None = None
    """Greatest side; None for twice `side`."""
    upscale: bool = False
    """Whether images that are smaller are scaled up."""

    def fit(self, size: Size, multiple: int) -> Size:
        """Return the bucket of an image of size (height, width).

        It is the one whose aspect ratio is the nearest to the image's. Without
        upscaling, it is not larger than the image: one with too few pixels for all
        buckets keeps its own size, cut to multiples of the step. Raises TooSmall.
        """
        step = self.step_for(multiple)
        candidates = self.sizes(multiple)
        if not self.upscale:
            candidates = [
                bucket
                for bucket in candidates
                if bucket[0] <= size[0] and bucket[1] <= size[1]
            ]
            if not candidates:
                own = (_cut(size[0], step), _cut(size[1], step))
                least, greatest = self._limits(step)
                height, width = min(own[0], greatest), min(own[1], greatest)
                if min(height, width) < least:
                    raise TooSmall(
                        f"{size[0]} x {size[1]} (height x width) is too small for a bucket of "
                        f"--resolution {self.side}: its least side is {least}; "
                        "--bucket_upscale scales it up, --bucket_min_side allows smaller ones"
                    )
                candidates.append((height, width))
        # Of those that cut off as much, the larger one.
        return min(
            candidates, key=lambda one: (cropped_share(size, one), -one[0] * one[1])
        )

    def sizes(self, multiple: int) -> list[Size]:
        """Return all buckets: of each height the widest, of each width the highest."""
        step = self.step_for(multiple)
        least, greatest = self._limits(step)
        found: dict[Size, None] = {}
        for side in range(least, greatest + 1, step):
            other = min(_cut(self.side**2 // side, step), greatest)
            if other >= least:
                found |= dict.fromkeys([(side, other), (other, side)])
        if not found:
            sides = f"with sides of {least} to {greatest} in steps of {step}"
            raise UsageError(
                "--resolution",
                f"{self.side} has no bucket {sides}",
                "change it, --bucket_step, --bucket_min_side or --bucket_max_side",
            )
        return list(found)

    def step_for(self, multiple: int) -> int:
        """Return the step in pixels for images whose sides are such multiples."""
        if self.step is not None:
            return math.lcm(self.step, multiple)
        return max(multiple, _cut(self.side // STEPS, multiple))

    def _limits(self, step: int) -> tuple[int, int]:
        """Return the least and the greatest side, as multiples of the step."""
        least = self.side // 2 if self.least is None else self.least
        greatest = 2 * self.side if self.greatest is None else self.greatest
        return max(step, math.ceil(least / step) * step), max(
            step, _cut(greatest, step)
        )


def cropped_share(size: Size, loaded: Size) -> float:
    """Return which share of an image of size (height, width) is cut off where it is
    scaled to cover another size: 0 to less than 1.
    """
    ratio = size[0] * loaded[1] / (size[1] * loaded[0])
    return 1 - min(ratio, 1 / ratio)


def _cut(side: int, step: int) -> int:
    return side - side % step
