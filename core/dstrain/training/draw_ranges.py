"""Find the samples of draws where parts of a table are drawn unequally often."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dstrain.training.permutation import Indices


@dataclass(frozen=True)
class DrawRanges:
    """Parts of the samples, in order, each drawn equally often."""

    first_samples: Indices
    """The first sample of each part; at the end, the number of samples."""
    first_draws: Indices
    """The first draw of each part; at the end, the number of draws."""
    repeat: Sequence[int]
    """How often each sample of a part is drawn."""

    @classmethod
    def of(cls, ends: Sequence[int], repeat: Sequence[int]) -> "DrawRanges":
        """Return the parts that end before these samples, with how often each is drawn."""
        first_samples = np.array([0, *ends], np.uint64)
        counts = np.diff(first_samples) * np.array(repeat, np.uint64)
        first_draws = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts)])
        return cls(first_samples, first_draws, repeat)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first sample of each part, the one after its last, and its repeat."""
        ends = self.first_samples.tolist()
        yield from zip(ends, ends[1:], self.repeat, strict=False)

    def samples(self, draws: Indices) -> Indices:
        """Return the samples of draws."""
        part, place = self._places(draws)
        samples: Indices = self.first_samples[part] + place % self._counts[part]
        return samples

    def repeats(self, draws: Indices) -> Indices:
        """Return which repeat of its sample each draw is."""
        part, place = self._places(draws)
        repeats: Indices = place // self._counts[part]
        return repeats

    @cached_property
    def _counts(self) -> Indices:
        # No draw is of a part without samples.
        return np.maximum(np.diff(self.first_samples), np.uint64(1))

    def _places(self, draws: Indices) -> tuple[Any, Indices]:
        """Return the part of each draw, and its place among those of the part."""
        if len(self.repeat) == 1:
            return 0, draws
        part = np.searchsorted(self.first_draws, draws, "right") - 1
        return part, draws - self.first_draws[part]
