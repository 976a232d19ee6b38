"""Order the samples of every epoch, and cut the order into batches.

The order is a keyed permutation that is never materialized, since rows x repeats may
exceed 10^9. Nothing here depends on the number of processes except the last step, which
gives each rank its part; so a run can resume on any number of them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dstrain.randomness import SampleKey, digest

CHUNK = 4096
"""Positions that are permuted at once."""
SKIPPED = -1
"""The group of a row without a sample."""
ROUNDS = 6
Indices = np.ndarray[Any, np.dtype[np.uint64]]


def permute(
    positions: Indices,
    size: int,
    key: Sequence[int],
) -> Indices:
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
class MicroBatch:
    """The samples that one process computes at once."""

    keys: Sequence[SampleKey]
    weights: Sequence[float]
    """1 for each sample, 0 for one that only fills up."""
    global_batch_size: int
    """The number of samples of the step, over all processes and micro-batches."""
    ends_step: bool


@dataclass(frozen=True)
class Order:
    """The samples of every epoch."""

    groups: Sequence[int]
    """Sample -> number of its signature: only samples of one signature share a batch.
    `SKIPPED` keeps the position of a row without a sample.
    """
    repeat: int
    """How often an epoch draws each sample."""
    samples_per_step: int
    seed: int
    sample_ids: Sequence[tuple[int, int]]
    """(row, chunk) of each sample."""

    @property
    def draws(self) -> int:
        """Return the number of positions in an epoch's order."""
        return len(self.groups) * self.repeat

    @cached_property
    def sample_count(self) -> int:
        """Return the number of samples of the dataset."""
        return sum(group != SKIPPED for group in self.groups)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in an epoch: the left-overs of each
        signature make one smaller batch.
        """
        steps = 0
        for group, samples in Counter(self.groups).items():
            if group != SKIPPED:
                steps += math.ceil(samples * self.repeat / self.samples_per_step)
        return steps

    def global_batches(self, epoch: int) -> Iterator[list[SampleKey]]:
        """Yield batches of one signature each: full ones as soon as they are, then the
        left-overs.
        """
        queues: dict[int, list[SampleKey]] = {}
        for item in self._items(epoch):
            repeat, sample = divmod(item, len(self.groups))
            group = self.groups[sample]
            if group == SKIPPED:
                continue
            queue = queues.setdefault(group, [])
            queue.append(SampleKey(self.seed, epoch, repeat, *self.sample_ids[sample]))
            if len(queue) == self.samples_per_step:
                yield queues.pop(group)
        for group in sorted(queues):
            yield queues[group]

    def _items(self, epoch: int) -> Iterator[int]:
        """Yield the epoch's draws in order, each as repeat * (number of samples) +
        sample.
        """
        # numpy is fast on many positions, and memory stays flat with few.
        for start in range(0, self.draws, CHUNK):
            stop = min(start + CHUNK, self.draws)
            positions = np.arange(start, stop, dtype=np.uint64)
            yield from permute(positions, self.draws, (self.seed, epoch)).tolist()


def with_skipped_rows(
    groups: Sequence[int],
    sample_ids: Sequence[tuple[int, int]],
    rows: int,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Add a sample of the group `SKIPPED` for each of the table's rows that has none.

    So the other samples are drawn in the order of the whole table. Returns groups and
    (row, chunk) of all samples.
    """
    present = {row for row, _ in sample_ids}
    skipped = [(row, 0) for row in range(rows) if row not in present]
    group_of = dict.fromkeys(skipped, SKIPPED)
    group_of.update(zip(sample_ids, groups, strict=True))
    in_order = sorted(group_of)
    return [group_of[one] for one in in_order], in_order


def split_across_ranks(
    samples: Sequence[SampleKey],
    batch_size: int,
    rank: int,
    processes: int,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank of a global batch, as many on every rank."""
    stride = batch_size * processes
    starts = range(0, len(samples), stride)
    for start in starts:
        of_all_ranks = samples[start : start + stride]
        keys = of_all_ranks[rank * batch_size :][:batch_size]
        weights = [1.0] * len(keys)
        if not keys:
            # Every rank must run equally many forward passes, or collectives hang:
            # repeat a sample with weight 0.
            keys = samples[:1]
            weights = [0.0]
        ends_step = start == starts[-1]
        yield MicroBatch(keys, weights, len(samples), ends_step)
