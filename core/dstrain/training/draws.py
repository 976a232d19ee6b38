"""Find the draw of each position in the order of an epoch, and the sample of each draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dstrain.randomness import digest

ROUNDS = 6
Indices = np.ndarray[Any, np.dtype[np.uint64]]


def permute(positions: Indices, size: int, key: Sequence[int]) -> Indices:
    """Map positions to items by a bijection of 0 .. size-1 that the key chooses.

    It is a balanced Feistel network (Luby and Rackoff 1988; four rounds suffice, six
    are used) with cycle walking (Black and Rogaway 2002).
    """
    # Halves of equal width, together just wide enough for size - 1.
    bits = max(size - 1, 1).bit_length()
    width = (bits + 1) // 2
    half = np.uint64(width)
    mask = np.uint64((1 << width) - 1)
    digests = [digest(key, "order", i) for i in range(ROUNDS)]
    round_keys = [np.uint64(int.from_bytes(one[:8], "little")) for one in digests]

    def encrypt(values: Indices) -> Indices:
        left = values >> half
        right = values & mask
        for round_key in round_keys:
            mixed = _mix(right ^ round_key) & mask
            left, right = right, left ^ mixed
        return (left << half) | right

    items = encrypt(positions)
    # The network permutes a power of two. An item outside is encrypted again until it
    # is inside, which keeps the whole a bijection.
    while (outside := items >= size).any():
        items[outside] = encrypt(items[outside])
    return items


def _mix(x: Indices) -> Indices:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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
