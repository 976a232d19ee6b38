"""The order of samples: a keyed permutation that is never materialised, dealt into
batches of one signature.

Nothing here depends on the number of processes but the last step, which hands each
process its part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dstrain.randomness import SampleKey, digest

CHUNK = 4096
EXCLUDED = -1
"""The group of a place in the order whose row gives no sample."""
ROUNDS = 6
Indices = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """A bijection of 0 .. size-1 chosen by a key: a balanced Feistel network with cycle
    walking.

    Luby and Rackoff 1988 (four rounds suffice; six are used); Black and Rogaway 2002
    for the walk.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [
            np.uint64(int.from_bytes(digest(key, "order", i)[:8], "little"))
            for i in range(ROUNDS)
        ]

    def permute(self, indices: Indices) -> Indices:
        """Map positions to items, both uint64 arrays below `size`."""
        result = self._encrypt(indices)
        while (outside := result >= self.size).any():
            result[outside] = self._encrypt(result[outside])
        return result

    def _encrypt(self, values: Indices) -> Indices:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(x: Indices) -> Indices:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class MicroBatch:
    """What one process computes at once: `weights` are 0 for fillers, `total` counts
    the global batch's samples.
    """

    keys: tuple[SampleKey, ...]
    weights: tuple[float, ...]
    total: int
    last: bool


@dataclass(frozen=True)
class Order:
    """The samples of every epoch.

    groups: sample -> number of its signature; `EXCLUDED` keeps the place of a row
    without a sample, and is not drawn. size: samples in a full global batch. places:
    (row, chunk) of each sample; without them, there is one sample of each row.
    """

    groups: tuple[int, ...]
    repeat: int
    size: int
    seed: int
    places: Sequence[tuple[int, int]] = ()

    @property
    def samples(self) -> int:
        """Places in the order of one epoch, repeats included."""
        return len(self.groups) * self.repeat

    @cached_property
    def drawn(self) -> int:
        """Samples of the data set, each of which an epoch draws as often as `repeat`
        says.
        """
        return sum(group != EXCLUDED for group in self.groups)

    @cached_property
    def steps(self) -> int:
        """Global batches in one epoch; each signature's left-overs make one smaller
        batch.
        """
        groups = np.asarray(self.groups)
        counts = np.bincount(groups[groups != EXCLUDED]) * self.repeat
        return int(sum(-(-int(count) // self.size) for count in counts if count))

    def _items(self, epoch: int) -> Iterator[int]:
        """The epoch's order of its draws, each numbered repeat * (samples of the data
        set) + sample.

        Never more than a chunk of them is held.
        """
        permutation = Permutation(self.samples, (self.seed, epoch))
        for start in range(0, self.samples, CHUNK):
            items = permutation.permute(
                np.arange(start, min(start + CHUNK, self.samples), dtype=np.uint64)
            )
            yield from items.tolist()

    def _key(self, epoch: int, item: int) -> SampleKey:
        repeat, sample = divmod(item, len(self.groups))
        row, chunk = self.places[sample] if self.places else (sample, 0)
        return SampleKey(self.seed, epoch, repeat, row, chunk)

    def global_batches(self, epoch: int) -> Iterator[list[SampleKey]]:
        """Yield batches of one signature each: full ones as their queue fills, then the
        left-overs.
        """
        queues: dict[int, list[SampleKey]] = {}
        for item in self._items(epoch):
            group = self.groups[item % len(self.groups)]
            if group == EXCLUDED:
                continue
            queue = queues.setdefault(group, [])
            queue.append(self._key(epoch, item))
            if len(queue) == self.size:
                yield queues.pop(group)
        for group in sorted(queues):
            yield queues[group]


def row_starts(places: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Row -> the number of its first sample, from the (row, chunk) of all samples in
    order; -1 for a row without.
    """
    numbers = {row: number for number, (row, chunk) in enumerate(places) if not chunk}
    first = tuple(numbers.get(row, -1) for row in range(1 + max(numbers, default=-1)))
    return range(len(first)) if first == tuple(range(len(places))) else first


def with_excluded_rows(
    groups: Sequence[int], places: Sequence[tuple[int, int]], rows: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Groups and places of samples, with one of the group `EXCLUDED` for each of the
    table's rows that gives none.

    So the order of the samples that are there is that of the whole table.
    """
    present = {row for row, _ in places}
    filled = list(zip(places, groups, strict=True))
    filled += [((row, 0), EXCLUDED) for row in range(rows) if row not in present]
    filled.sort()
    return tuple(group for _, group in filled), tuple(place for place, _ in filled)


def sample_index(first: Sequence[int], row: int, chunk: int) -> int:
    """The number of the sample of a row and chunk; `first` is empty where each row has
    one sample.
    """
    return (first[row] if first else row) + chunk


def split_across_ranks(
    samples: Sequence[SampleKey], batch_size: int, rank: int, processes: int
) -> Iterator[MicroBatch]:
    """Yield one process's micro-batches of a global batch; every process gets equally
    many.
    """
    stride = batch_size * processes
    starts = range(0, len(samples), stride)
    for start in starts:
        keys = samples[start : start + stride][rank * batch_size :][:batch_size]
        weights = [1.0] * len(keys)
        if not keys:
            # Every rank must run equally many forward passes, or collectives hang:
            # repeat a sample with weight 0.
            keys = samples[:1]
            weights = [0.0]
        last = start == starts[-1]
        yield MicroBatch(tuple(keys), tuple(weights), len(samples), last=last)
