"""The order of samples: a bijection never written out, the same for any number of
processes.
"""

import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, permutations

import numpy as np
import pytest
from dstrain import SampleKey
from dstrain.training import (
    SKIPPED,
    MicroBatch,
    Order,
    Position,
    RepeatedRows,
    split_across_ranks,
    with_skipped_rows,
)
from dstrain.training.batching import CHUNK, LARGE_CHUNK, Indices, permute, sample_index


def one_of_each_row(
    groups: tuple[int, ...], repeat: int, samples_per_step: int, seed: int
) -> Order:
    """The order of rows that have one sample each."""
    sample_ids = [(row, 0) for row in range(len(groups))]
    return Order(groups, repeat, samples_per_step, seed, sample_ids)


HUGE = one_of_each_row(
    tuple(row % 3 for row in range(100_000)), repeat=20_000, samples_per_step=8, seed=0
)


def whole(size: int, *key: int) -> Indices:
    return permute(np.arange(size, dtype=np.uint64), size, key or (0,))


def keys(count: int) -> list[SampleKey]:
    return [SampleKey(0, 0, 0, row) for row in range(count)]


def dealt(count: int, batch_size: int, processes: int) -> list[list[MicroBatch]]:
    """The micro-batches of a global batch, by process."""
    return [
        list(split_across_ranks(keys(count), batch_size, rank, processes))
        for rank in range(processes)
    ]


def test_a_permutation_takes_every_item_once_at_every_size_up_to_300() -> None:
    for size in range(1, 301):
        assert sorted(whole(size, size).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1_023, 1_024, 1_025, 4_097, 65_537, 100_003])
def test_a_permutation_takes_every_item_once_at_larger_sizes(size: int) -> None:
    for key in ((0, 0), (7, 1), (2**62, 3)):
        assert np.array_equal(np.sort(whole(size, *key)), np.arange(size))


def test_a_permutation_of_more_than_2_to_the_32_stays_within_it() -> None:
    size = 3 * 2**33 + 1
    there = np.concatenate([np.arange(50_000), np.arange(size - 50_000, size)]).astype(
        np.uint64
    )
    items = permute(there, size, (5,))
    assert len(np.unique(items)) == 100_000
    assert int(items.max()) < size
    assert abs(float(items.astype(np.float64).mean()) / size - 0.5) < 0.005


def test_the_key_decides_the_permutation_and_every_order_comes_up() -> None:
    assert np.array_equal(whole(100, 1, 2), whole(100, 1, 2))
    assert not np.array_equal(whole(100, 1, 2), whole(100, 1, 3))
    seen = [tuple(whole(4, key).tolist()) for key in range(2400)]
    counts = [seen.count(order) for order in permutations(range(4))]
    assert min(counts) > 50
    assert max(counts) < 200


def test_neighbours_do_not_stay_neighbours() -> None:
    items = whole(10_000, 3).astype(np.int64)
    assert abs(float(np.corrcoef(items, np.arange(10_000))[0, 1])) < 0.05
    assert abs(float(np.corrcoef(items[:-1], items[1:])[0, 1])) < 0.05


def test_an_epoch_draws_each_row_as_often_as_asked_and_each_draw_has_its_own_key() -> (
    None
):
    drawn = list(
        chain(
            *one_of_each_row(
                (0,) * 7, repeat=5, samples_per_step=4, seed=9
            ).global_batches(epoch=2)
        )
    )
    assert sorted(drawn) == [
        SampleKey(9, 2, repeat, row) for repeat in range(5) for row in range(7)
    ]


IDS = ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))


def test_rows_of_several_samples_give_each_its_own_key_and_keep_the_order_of_as_many_rows() -> (
    None
):
    groups = (0, 1, 0, 1, 1, 0)
    by_sample, by_row = Order(groups, 3, 4, 1, IDS), one_of_each_row(groups, 3, 4, 1)
    batches = list(by_sample.global_batches(2))
    drawn = [[(key.repeat, key.row, key.chunk) for key in batch] for batch in batches]
    assert sorted(chain(*drawn)) == [
        (repeat, *sample_id) for repeat in range(3) for sample_id in IDS
    ]
    assert drawn == [
        [(key.repeat, *IDS[key.row]) for key in batch]
        for batch in by_row.global_batches(2)
    ]
    group_of = dict(zip(IDS, groups, strict=True))
    assert all(
        len({group_of[key.row, key.chunk] for key in batch}) == 1 for batch in batches
    )


def test_rows_without_a_sample_keep_their_position_in_the_order() -> None:
    groups, sample_ids = with_skipped_rows((4, 4, 5), ((1, 0), (1, 1), (3, 0)), 5)
    assert sample_ids.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [4, 0]]
    assert groups.tolist() == [SKIPPED, 4, 4, SKIPPED, 5, SKIPPED]


def test_epochs_and_seeds_differ_in_their_order() -> None:
    orders = [
        [
            key.row
            for key in chain(
                *one_of_each_row((0,) * 50, 1, 4, seed).global_batches(epoch)
            )
        ]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3


def test_global_batches_hold_one_signature_each_and_lose_no_sample() -> None:
    order = one_of_each_row((0, 1, 1, 2, 1, 0), repeat=5, samples_per_step=4, seed=1)
    batches = list(order.global_batches(0))
    assert sorted(chain(*batches)) == [
        SampleKey(1, 0, repeat, row) for repeat in range(5) for row in range(6)
    ]
    assert all(len({order.groups[key.row] for key in batch}) == 1 for batch in batches)
    assert sorted(map(len, batches)) == [1, 2, 3, *[4] * 6]
    assert order.steps_per_epoch == len(batches)


def drawn_samples(order: Order) -> list[tuple[int, int]]:
    """(repeat, sample) of each draw."""
    rows = order.sample_ids[:, 0].tolist()
    first = 0
    draws = []
    for part in order.repeated or (RepeatedRows(rows[-1] + 1, 1),):
        samples = [n for n, row in enumerate(rows) if first <= row < part.end]
        for repeat in range(part.repeat * order.repeat):
            draws += [(repeat, sample) for sample in samples]
        first = part.end
    return draws


def plain_batches(order: Order, epoch: int) -> list[list[SampleKey]]:
    """The batches of an epoch, draw by draw."""
    queues: dict[int, list[SampleKey]] = {}
    batches = []
    draws = drawn_samples(order)
    assert len(draws) == order.draws
    for item in whole(order.draws, order.seed, epoch).tolist():
        repeat, sample = draws[item]
        group = int(order.groups[sample])
        if group == SKIPPED:
            continue
        queue = queues.setdefault(group, [])
        place = order.sample_ids[sample].tolist()
        queue.append(SampleKey(order.seed, epoch, repeat, *place))
        if len(queue) == order.samples_per_step:
            batches.append(queues.pop(group))
    return batches + [queues[group] for group in sorted(queues)]


@pytest.mark.parametrize("kinds", [1, 3, 300])
@pytest.mark.parametrize("samples_per_step", [1, 4, 7])
def test_batches_are_those_that_fill_up_draw_by_draw(
    kinds: int, samples_per_step: int
) -> None:
    generator = np.random.default_rng(kinds)
    groups = generator.integers(SKIPPED, kinds, 700)
    ids = np.stack([np.arange(700) // 2, np.arange(700) % 2], axis=1)
    order = Order(groups, 13, samples_per_step, 5, ids)
    assert order.draws > 2 * CHUNK
    for epoch in (0, 3):
        assert list(order.global_batches(epoch)) == plain_batches(order, epoch)


@pytest.mark.parametrize("repeats", [(1, 1, 1), (3, 1, 20), (1, 5, 2)])
def test_parts_of_a_table_are_drawn_as_often_as_each_is_to_be(
    repeats: tuple[int, ...],
) -> None:
    generator = np.random.default_rng(3)
    groups = generator.integers(SKIPPED, 3, 700)
    ids = np.stack([np.arange(700) // 2, np.arange(700) % 2], axis=1)
    ends = (100, 100, 350) if repeats[1] == 5 else (30, 200, 350)
    parts = tuple(map(RepeatedRows, ends, repeats))
    order = Order(groups, 2, 4, 5, ids, parts)
    batches = list(order.global_batches(1))
    assert batches == plain_batches(order, 1)
    assert order.steps_per_epoch == len(batches)
    count = Counter(key.row for batch in batches for key in batch)
    for row in range(350):
        part = next(part for part in parts if row < part.end)
        samples = sum(group != SKIPPED for group in groups[2 * row : 2 * row + 2])
        assert count[row] == 2 * part.repeat * samples


def test_an_epoch_of_parts_continues_after_any_batch() -> None:
    parts = (RepeatedRows(50, 9), RepeatedRows(700, 12))
    order = replace(mixed(repeat=1), repeated=parts)
    assert order.identity != mixed(repeat=1).identity
    passed: list[Position] = []
    batches = list(order.global_batches(2, on_position=passed.append))
    for done in (0, 1, 500, len(batches)):
        for known in (None, *passed):
            assert list(order.global_batches(2, done, known)) == batches[done:]


def test_all_rows_in_one_part_are_as_without_parts() -> None:
    order = mixed()
    other = replace(order, repeated=(RepeatedRows(700, 1),))
    assert list(order.global_batches(0)) == list(other.global_batches(0))


def test_a_sample_counts_what_its_weight_is() -> None:
    samples = keys(5)
    (first, second), (third, filler) = (
        list(split_across_ranks(samples, 2, rank, 2, lambda key: key.row / 2))
        for rank in (0, 1)
    )
    assert (first.weights, second.weights) == ([0, 0.5], [2])
    assert (third.weights, filler.weights) == ([1, 1.5], [0])


def mixed(repeat: int = 13, samples_per_step: int = 7) -> Order:
    """An order of three signatures and rows without samples."""
    groups = np.random.default_rng(1).integers(SKIPPED, 3, 700)
    ids = [(row, 0) for row in range(700)]
    return Order(groups, repeat, samples_per_step, 5, ids)


def test_an_epoch_continues_after_any_batch_from_any_position_before_it() -> None:
    order = mixed()
    passed: list[Position] = []
    batches = list(order.global_batches(2, on_position=passed.append))
    assert [one.draws for one in passed] == [0, CHUNK, 2 * CHUNK, order.draws]
    assert len(batches) == order.steps_per_epoch > passed[-1].batches
    ends = [0, 1, *(one.batches for one in passed), len(batches) - 1, len(batches)]
    for done in sorted({*ends, *(end - 1 for end in ends[2:])}):
        for known in (None, *passed):
            again = order.global_batches(2, max(done, 0), known)
            assert list(again) == batches[max(done, 0) :]


def test_a_position_of_another_order_or_epoch_changes_nothing() -> None:
    order = mixed()
    batches = list(order.global_batches(0))
    others = (
        (mixed(repeat=14), 0),
        (mixed(samples_per_step=8), 0),
        (replace(order, seed=6), 0),
        (replace(order, groups=np.roll(order.groups, 1)), 0),
        (order, 1),
    )
    for other, epoch in others:
        passed: list[Position] = []
        next(other.global_batches(epoch, 500, on_position=passed.append))
        assert passed[-1].draws > 0
        assert list(order.global_batches(0, 900, passed[-1])) == batches[900:]


@pytest.fixture
def permuted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of positions in each call of `permute`."""
    counts: list[int] = []

    def counting(positions: Indices, size: int, key: Sequence[int]) -> Indices:
        counts.append(len(positions))
        return permute(positions, size, key)

    monkeypatch.setattr("dstrain.training.batching.permute", counting)
    return counts


def test_the_middle_of_a_thousand_million_draws_is_a_few_chunks_away(
    permuted: list[int],
) -> None:
    order = one_of_each_row((0,) * 1000, 1_000_000, samples_per_step=7, seed=3)
    start = 500_000_000 // CHUNK * CHUNK
    # Of one signature, every seven draws are a batch.
    full, rest = divmod(start, 7)
    queued = permute(np.arange(start - rest, start, dtype=np.uint64), 10**9, (3, 0))
    known = Position(order.identity, 0, full, start, queued.tolist())
    done = full + 1000
    draws = np.arange(7 * done, 7 * done + 70, dtype=np.uint64)
    expected = [
        SampleKey(3, 0, *divmod(draw, 1000))
        for draw in permute(draws, 10**9, (3, 0)).tolist()
    ]
    found = islice(order.global_batches(0, done, known), 10)
    assert list(chain(*found)) == expected
    assert len(permuted) <= 3
    assert sum(permuted) <= 3 * LARGE_CHUNK


def test_few_samples_wait_however_many_signatures_there_are(
    permuted: list[int],
) -> None:
    order = one_of_each_row(tuple(range(1_000)), 64, samples_per_step=64, seed=0)
    next(order.global_batches(0))
    # Chunks grow with what waits, so that it is not sorted again for each few draws.
    assert permuted[0] == CHUNK < permuted[-1]
    assert len(permuted) < 15


def test_arrays_are_not_copied_and_keys_have_plain_numbers() -> None:
    groups = np.zeros(5, np.int32)
    ids = np.stack([np.arange(5), np.zeros(5, np.int64)], axis=1)
    kept = with_skipped_rows(groups, ids, 5)
    order = Order(kept[0], 1, 5, 0, kept[1])
    assert order.groups is groups
    assert order.sample_ids.base is ids or order.sample_ids is ids
    (batch,) = order.global_batches(0)
    assert {type(number) for key in batch for number in key} == {int}


def test_a_sample_is_found_by_row_and_chunk() -> None:
    for ids in (IDS, np.array(IDS)):
        assert [sample_index(ids, *one) for one in IDS] == [*range(len(IDS))]


def test_a_group_that_no_row_has_makes_no_step() -> None:
    order = one_of_each_row((3, 3), repeat=1, samples_per_step=2, seed=0)
    assert order.steps_per_epoch == len(list(order.global_batches(0))) == 1


@pytest.mark.parametrize(
    ("processes", "batch_size"),
    [(1, 8), (1, 4), (1, 1), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)],
)
@pytest.mark.parametrize("count", [8, 7, 5, 1])
def test_any_number_of_processes_gets_the_same_list_of_samples(
    count: int, processes: int, batch_size: int
) -> None:
    by_process = dealt(count, batch_size, processes)
    used = [
        key
        for turn in zip(*by_process, strict=True)
        for micro in turn
        for key, weight in zip(micro.keys, micro.weights, strict=True)
        if weight
    ]
    assert used == keys(count)


@pytest.mark.parametrize(
    ("count", "fillers"), [(8, 0), (7, 0), (5, 1), (4, 2), (3, 2), (1, 3)]
)
def test_fillers_weigh_nothing_and_every_process_gets_equally_many_micro_batches(
    count: int, fillers: int
) -> None:
    by_process = dealt(count, 2, 4)
    micros = list(chain(*by_process))
    assert {len(part) for part in by_process} == {1}
    assert sum(sum(micro.weights) for micro in micros) == count
    assert {micro.global_batch_size for micro in micros} == {count}
    assert sum(not any(micro.weights) for micro in micros) == fillers
    assert all(micro.keys and len(micro.keys) == len(micro.weights) for micro in micros)


def test_only_the_last_micro_batch_of_a_step_ends_it() -> None:
    for part in dealt(7, 1, 2):
        assert [micro.ends_step for micro in part] == [False, False, False, True]


def test_two_thousand_million_draws_start_at_once_with_flat_memory() -> None:
    start = time.process_time()
    assert HUGE.draws == 2_000_000_000
    assert HUGE.steps_per_epoch == sum(
        -(-rows * 20_000 // 8) for rows in (33_334, 33_333, 33_333)
    )
    assert len(list(islice(HUGE.global_batches(1), 100))) == 100
    assert time.process_time() - start < 1
    tracemalloc.start()
    seen = sum(len(batch) for batch in islice(HUGE.global_batches(0), 3_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 24_000
    assert peak < 2_000_000
