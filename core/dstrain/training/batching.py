"""Order the samples of every epoch, and cut the order into batches.

The order is a keyed permutation that is never materialized, since rows x repeats may
exceed 10^9. Nothing here depends on the number of processes except the last step, which
gives each rank its part; so a run can resume on any number of them.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dstrain.randomness import SampleKey
from dstrain.training.draws import DrawRanges, Indices, permute


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one process computes at once."""

    keys: Sequence[SampleKey]
    weights: Sequence[float]
    """What the loss of each sample counts, usually 1; 0 for one that only fills up."""
    global_batch_size: int
    """The number of samples of the step, over all processes and micro-batches."""
    ends_step: bool


def split_across_ranks(
    samples: Sequence[SampleKey],
    batch_size: int,
    rank: int,
    processes: int,
    weight_of: Callable[[SampleKey], float] = lambda key: 1.0,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank, of `batch_size` samples at most, of a global
    batch, as many on every rank; `weight_of` is what a sample's loss is multiplied by.
    """
    stride = batch_size * processes
    starts = range(0, len(samples), stride)
    for start in starts:
        of_all_ranks = samples[start : start + stride]
        keys = of_all_ranks[rank * batch_size :][:batch_size]
        weights = [weight_of(key) for key in keys]
        if not keys:
            # Every rank must run equally many forward passes, or collectives hang:
            # repeat a sample with weight 0.
            keys = samples[:1]
            weights = [0.0]
        yield MicroBatch(keys, weights, len(samples), start == starts[-1])


CHUNK = 4096
"""Positions that are permuted at once."""
LARGE_CHUNK = 4 * CHUNK
"""Positions that are permuted at once where nothing waits for the next batch."""
SKIPPED = -1
"""The group of a row without a sample."""
Groups = np.ndarray[Any, np.dtype[np.int32]]
"""Sample -> number of its signature, or `SKIPPED`."""
SampleIds = np.ndarray[Any, np.dtype[np.int64]]
"""(row, chunk) of each sample, (samples, 2), in order."""


def as_sample_ids(sample_ids: ArrayLike) -> SampleIds:
    """Return rows and chunks as an array; one of this type stays as it is."""
    return np.asarray(sample_ids, np.int64).reshape(-1, 2)


def sample_index(
    sample_ids: Sequence[Any] | SampleIds, row: int, chunk: int = 0
) -> int:
    """Return the index of a sample among those that are in order, of one that is absent
    the index at which it would be.
    """
    return bisect_left(sample_ids, (row, chunk), key=tuple)


@dataclass(frozen=True)
class Position:
    """A place in the order of an epoch from which its batches can be cut without the
    draws before it.
    """

    order: str
    """`Order.identity` of the order that it is of."""
    epoch: int
    batches: int
    """Full batches before it."""
    draws: int
    """Draws before it."""
    queued: Sequence[int]
    """The draws among these that no full batch has, by signature."""


class RepeatedRows(NamedTuple):
    """Rows that follow each other and are drawn equally often."""

    end: int
    """The row after the last one."""
    repeat: int
    """How often an epoch draws each of their samples, beside the repeat of all."""


@dataclass(frozen=True, eq=False)
class Order:
    """The samples of every epoch."""

    groups: Groups
    """Sample -> number of its signature: only samples of one signature share a batch.
    `SKIPPED` keeps the position of a row without a sample.
    """
    repeat: int
    """How often an epoch draws each sample."""
    samples_per_step: int
    seed: int
    sample_ids: SampleIds
    """(row, chunk) of each sample."""
    repeated: Sequence[RepeatedRows] = ()
    """Parts of the table, in order, that together are all of it; () for all rows alike."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", np.asarray(self.groups, np.int32))
        object.__setattr__(self, "sample_ids", as_sample_ids(self.sample_ids))

    @property
    def draws(self) -> int:
        """Return the number of positions in an epoch's order."""
        return int(self._ranges.first_draws[-1])

    @cached_property
    def _ranges(self) -> "DrawRanges":
        rows = self.sample_ids[:, 0]
        count = len(self.groups)
        ends = [int(rows.searchsorted(part.end)) for part in self.repeated] or [count]
        factors = [part.repeat for part in self.repeated] or [1]
        return DrawRanges.of(ends, [self.repeat * factor for factor in factors])

    @cached_property
    def sample_count(self) -> int:
        """Return the number of samples of the dataset."""
        return int(self.group_counts.sum())

    @cached_property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in an epoch: the left-overs of each
        signature make one smaller batch.
        """
        return int((-(-self.draws_of_groups // self.samples_per_step)).sum())

    @cached_property
    def draws_of_groups(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return how many samples of each signature an epoch draws."""
        drawn = np.zeros(len(self.group_counts), np.int64)
        for start, end, repeat in self._ranges.parts():
            groups = self.groups[start:end]
            groups = groups[groups != SKIPPED]
            drawn += repeat * np.bincount(groups, minlength=len(drawn))
        return drawn

    @property
    def group_count(self) -> int:
        """Return the number of signatures that samples have."""
        return int(np.count_nonzero(self.group_counts))

    @cached_property
    def group_counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the number of samples of each signature."""
        return np.bincount(self.groups[self.groups != SKIPPED]).astype(np.int64)

    @cached_property
    def identity(self) -> str:
        """Return a digest of all that decides which draws share a batch."""
        numbers: tuple[Any, ...] = (
            self.seed,
            self.repeat,
            self.samples_per_step,
            len(self.groups),
        )
        if self.repeated:
            numbers += (tuple(map(tuple, self.repeated)),)
        state = hashlib.blake2b(repr(numbers).encode(), digest_size=16)
        state.update(self.groups.astype("<i4").tobytes())
        return state.hexdigest()

    def global_batches(
        self,
        epoch: int,
        done: int = 0,
        known: Position | None = None,
        on_position: Callable[[Position], object] = lambda position: None,
    ) -> Iterator[list[SampleKey]]:
        """Yield batches of one signature each, the first `done` left out: full ones as
        soon as they are, then the left-overs.

        A `known` position, passed earlier, saves the walk to it if it is of this order
        and not beyond these batches; it changes no batch. `on_position` is called with
        each position from which the next batches can be cut, before these are yielded.
        """
        position = self._position_before(epoch, done, known)
        on_position(position)
        left_out = done - position.batches
        for batches, following in self._chunks(position, CHUNK):
            on_position(following)
            yield from self._keys(epoch, batches[left_out:])
            left_out = max(0, left_out - len(batches))
            position = following
        for draws in self._left_overs(position)[left_out:]:
            yield from self._keys(epoch, draws[np.newaxis])

    def _position_before(
        self, epoch: int, done: int, known: Position | None
    ) -> Position:
        """Return a position with at most `done` full batches before it, less than a
        large chunk of draws before the last of them.
        """
        position = Position(self.identity, epoch, 0, 0, ())
        if known is not None and (known.order, known.epoch) == (self.identity, epoch):
            position = known if known.batches <= done else position
        # Less than a chunk of draws is walked when the batches are yielded.
        chunks = self._chunks(position, LARGE_CHUNK)
        while (done - position.batches) * self.samples_per_step > LARGE_CHUNK:
            _, following = next(chunks, (None, position))
            if following is position or following.batches > done:
                break
            position = following
        return position

    def _chunks(
        self, position: Position, size: int
    ) -> Iterator[tuple[Indices, Position]]:
        """Yield, for chunk after chunk of draws, the batches that it fills, as draws,
        and the position after it.

        A draw is repeat * (number of samples) + sample; of several parts of the table,
        those of the first part come first.
        """
        made = position.batches
        start = position.draws
        queued = np.array(position.queued, np.uint64)
        while start < self.draws:
            # Those that are queued are sorted with each chunk: not more often than
            # others are drawn.
            chunks = start // size + 1 + len(queued) // size
            stop = min(chunks * size, self.draws)
            drawn = permute(
                np.arange(start, stop, dtype=np.uint64),
                self.draws,
                (self.seed, position.epoch),
            )
            batches, queued = self._cut(np.concatenate([queued, drawn]))
            made += len(batches)
            start = stop
            yield (
                batches,
                replace(position, batches=made, draws=stop, queued=queued.tolist()),
            )

    def _cut(self, draws: Indices) -> tuple[Indices, Indices]:
        """Return the full batches, (batches, samples per step), in the order in which
        their last samples were drawn, and the draws that are left, by signature.
        """
        size = self.samples_per_step
        groups = self.groups[self._ranges.samples(draws)]
        draws = draws[groups != SKIPPED]
        groups = groups[groups != SKIPPED]
        # Sorted stably, the draws of each signature are together, as they were drawn.
        # Short numbers are sorted by their digits, ten times as fast.
        by_group = np.argsort(groups.astype(self._shortest), kind="stable")
        in_group = groups[by_group]
        starts = np.flatnonzero(np.diff(in_group, prepend=SKIPPED))
        counts = np.diff(starts, append=len(draws))
        place = np.arange(len(draws)) - np.repeat(starts, counts)
        is_full = place < np.repeat(counts - counts % size, counts)
        batches = by_group[is_full].reshape(-1, size)
        batches = batches[np.argsort(batches[:, -1])]
        return draws[batches], draws[by_group[~is_full]]

    @cached_property
    def _shortest(self) -> np.dtype[Any]:
        """The shortest type of numbers for all signatures."""
        return np.min_scalar_type(len(self.group_counts))

    def _left_overs(self, end: Position) -> list[Indices]:
        """Return the smaller batches at an epoch's end, one for each signature."""
        queued = np.array(end.queued, np.uint64)
        groups = self.groups[self._ranges.samples(queued)]
        ends = np.flatnonzero(np.diff(groups)) + 1
        return np.split(queued, ends) if len(queued) else []

    def _keys(self, epoch: int, batches: Indices) -> Iterator[list[SampleKey]]:
        """Yield the keys of batches of draws, (batches, samples)."""
        samples = self._ranges.samples(batches)
        repeats = self._ranges.repeats(batches)
        places = self.sample_ids[samples].tolist()
        for of_batch, own_places in zip(repeats.tolist(), places, strict=True):
            yield [
                SampleKey(self.seed, epoch, repeat, row, chunk)
                for repeat, (row, chunk) in zip(of_batch, own_places, strict=True)
            ]
