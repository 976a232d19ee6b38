"""The order of samples: a bijection never written out, for any number of processes."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, permutations
from typing import Any

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


def one_of_each_row(
    groups: Sequence[int], repeat: int = 1, samples_per_step: int = 1, seed: int = 0
) -> Order:
    sample_ids = [(row, 0) for row in range(len(groups))]
    return Order(groups, repeat, samples_per_step, seed, sample_ids)


def rows_of(order: Order, epoch: int = 0) -> list[int]:
    return [key.row for batch in order.global_batches(epoch) for key in batch]


def permutation(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return rows_of(one_of_each_row((0,) * size, seed=seed), epoch)


def keys(count: int) -> list[SampleKey]:
    return [SampleKey(0, 0, 0, row) for row in range(count)]


def dealt(count: int, batch_size: int, processes: int) -> list[list[MicroBatch]]:
    """The micro-batches of a global batch, by process."""
    return [
        list(split_across_ranks(keys(count), batch_size, rank, processes))
        for rank in range(processes)
    ]


def test_an_epoch_takes_every_row_once_at_every_number_up_to_300() -> None:
    for size in range(1, 301):
        assert sorted(permutation(size, size)) == [*range(size)]


def between(order: Order, start: int, count: int) -> list[tuple[int, int]]:
    """(repeat, row) of so many draws from one on, of one signature and sample per step."""
    known = Position(order.identity, 0, start, start, ())
    batches = islice(order.global_batches(0, start, known), count)
    return [(key.repeat, key.row) for (key,) in batches]


def test_more_than_2_to_the_32_draws_are_all_different_and_anywhere() -> None:
    repeats = 2**33
    order = one_of_each_row((0, 0, 0), repeats)
    assert order.draws == 3 * repeats
    draws = between(order, 0, 20_000) + between(order, order.draws - 20_000, 20_000)
    assert len(set(draws)) == 40_000
    mean = np.array([repeat for repeat, _ in draws]).mean() / repeats
    assert abs(mean - 0.5) < 0.01
    assert set(Counter(row for _, row in draws)) == {0, 1, 2}


def test_seed_and_epoch_decide_the_order_and_every_order_comes_up() -> None:
    assert permutation(100, 1, 2) == permutation(100, 1, 2)
    assert permutation(4) == [3, 0, 1, 2]  # as in older versions
    different = {tuple(permutation(50, *one)) for one in ((0, 0), (0, 1), (1, 0))}
    assert len(different) == 3
    counts = Counter(tuple(permutation(4, seed)) for seed in range(2400))
    assert set(counts) == set(permutations(range(4)))
    assert min(counts.values()) > 50
    assert max(counts.values()) < 200


IDS = ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))


def test_samples_of_a_row_have_keys_of_their_own_in_the_order_of_rows() -> None:
    groups = (0, 1, 0, 1, 1, 0)
    by_sample = Order(groups, 3, 4, 1, IDS)
    by_row = one_of_each_row(groups, 3, 4, 1)
    drawn = [
        [(k.repeat, k.row, k.chunk) for k in b] for b in by_sample.global_batches(2)
    ]
    assert sorted(chain(*drawn)) == [(n, *one) for n in range(3) for one in IDS]
    as_rows = [[(k.repeat, *IDS[k.row]) for k in b] for b in by_row.global_batches(2)]
    assert drawn == as_rows


def test_rows_without_a_sample_keep_their_position_in_the_order() -> None:
    groups, sample_ids = with_skipped_rows((4, 4, 5), ((1, 0), (1, 1), (3, 0)), 5)
    assert sample_ids.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [4, 0]]
    assert groups.tolist() == [SKIPPED, 4, 4, SKIPPED, 5, SKIPPED]
    order = Order(groups, 1, 1, 0, sample_ids)
    assert (order.sample_count, order.group_count) == (3, 2)


def test_global_batches_hold_one_signature_each_and_lose_no_sample() -> None:
    order = one_of_each_row((0, 1, 1, 3, 1, 0), repeat=5, samples_per_step=4, seed=1)
    batches = list(order.global_batches(2))
    wanted = [SampleKey(1, 2, repeat, row) for repeat in range(5) for row in range(6)]
    assert sorted(chain(*batches)) == wanted
    assert all(len({order.groups[key.row] for key in batch}) == 1 for batch in batches)
    assert sorted(map(len, batches)) == [1, 2, 3, *[4] * 6]
    assert order.steps_per_epoch == len(batches)


def drawn_samples(order: Order) -> list[tuple[int, int]]:
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
    queues: dict[int, list[SampleKey]] = {}
    batches = []
    draws = drawn_samples(order)
    for item in permutation(len(draws), order.seed, epoch):
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


def two_of_each_row(
    kinds: int, repeat: int, samples_per_step: int, **more: Any
) -> Order:
    """An order of 350 rows, some of whose samples are skipped."""
    groups = np.random.default_rng(kinds).integers(SKIPPED, kinds, 700)
    ids = np.stack([np.arange(700) // 2, np.arange(700) % 2], axis=1)
    return Order(groups, repeat, samples_per_step, 5, ids, **more)


@pytest.mark.parametrize("kinds", [1, 3, 300])
@pytest.mark.parametrize("samples_per_step", [1, 4, 7])
def test_batches_fill_up_draw_by_draw(kinds: int, samples_per_step: int) -> None:
    order = two_of_each_row(kinds, 13, samples_per_step)
    for epoch in (0, 3):
        assert list(order.global_batches(epoch)) == plain_batches(order, epoch)


@pytest.mark.parametrize("repeats", [(1, 1, 1), (3, 1, 20), (1, 5, 2)])
def test_parts_of_a_table_are_drawn_as_often_as_told(repeats: tuple[int, ...]) -> None:
    ends = (100, 100, 350) if repeats[1] == 5 else (30, 200, 350)
    parts = tuple(map(RepeatedRows, ends, repeats))
    order = two_of_each_row(3, 2, 4, repeated=parts)
    batches = list(order.global_batches(1))
    assert batches == plain_batches(order, 1)
    assert order.steps_per_epoch == len(batches)
    count = Counter(key.row for batch in batches for key in batch)
    for row in range(350):
        part = next(part for part in parts if row < part.end)
        samples = int((order.groups[2 * row : 2 * row + 2] != SKIPPED).sum())
        assert count[row] == 2 * part.repeat * samples


def mixed(repeat: int = 13, samples_per_step: int = 7) -> Order:
    """An order of three signatures and rows without samples."""
    groups = np.random.default_rng(1).integers(SKIPPED, 3, 700)
    return one_of_each_row(groups, repeat, samples_per_step, 5)


PARTS = (RepeatedRows(50, 9), RepeatedRows(700, 12))


@pytest.mark.parametrize(
    "order", [mixed(), replace(mixed(1), repeated=PARTS)], ids=["rows", "parts"]
)
def test_an_epoch_continues_after_any_batch_from_before_it(order: Order) -> None:
    passed: list[Position] = []
    batches = list(order.global_batches(2, on_position=passed.append))
    draws = [one.draws for one in passed]
    assert draws == sorted(draws) and (draws[0], draws[-1]) == (0, order.draws)
    assert len(draws) > 2
    assert len(batches) == order.steps_per_epoch > passed[-1].batches
    ends = {0, 1, *(one.batches for one in passed), len(batches) - 1, len(batches)}
    for done in ends | {end - 1 for end in ends if end}:
        for known in (None, *passed):
            assert list(order.global_batches(2, done, known)) == batches[done:]


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


def test_two_thousand_million_draws_need_flat_memory() -> None:
    groups = [row % 3 for row in range(100_000)]
    order = one_of_each_row(groups, repeat=20_000, samples_per_step=8)
    assert order.draws == 2_000_000_000
    counts = (33_334, 33_333, 33_333)
    assert order.steps_per_epoch == sum(-(-rows * 20_000 // 8) for rows in counts)
    tracemalloc.start()
    seen = sum(len(batch) for batch in islice(order.global_batches(0), 3_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 24_000
    assert peak < 2_000_000
