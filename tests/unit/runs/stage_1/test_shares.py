"""Work is divided by what is computed: evenly, each value once, whatever the order."""

import random
from collections import Counter
from collections.abc import Sequence
from hashlib import sha1
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.runs.stage_1.shares import share_of


def work_of(row: int, units: Sequence[str]) -> Any:
    """The work of a row, whose address is that of any value: a hash."""
    return SimpleNamespace(
        row=row,
        values=units,
        sample=SimpleNamespace(
            addresses={
                unit: sha1(f"{unit} {row}".encode()).hexdigest() for unit in units
            }
        ),
        steps=[SimpleNamespace(unit=SimpleNamespace(name=unit)) for unit in units],
    )


WORK = [work_of(row, ["text", "image"][row % 5 > 0 :]) for row in range(101)]
"""Every fifth row has a prompt of its own."""


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_each_work_is_done_once_whatever_the_order_of_each_process(size: int) -> None:
    shares = []
    for rank in range(size):
        own_order = random.Random(rank).sample(WORK, len(WORK))
        share = [*share_of(own_order, rank, size)]
        # Within a share nothing changes places: images are read as the table has them.
        assert share == [one for one in own_order if one in share]
        shares.append({one.row for one in share})
    assert sorted(row for share in shares for row in share) == list(range(101))


@pytest.mark.parametrize("size", [2, 4, 7])
def test_shares_are_even_in_number_and_in_kind(size: int) -> None:
    shares = [share_of(WORK, rank, size) for rank in range(size)]
    kinds = [Counter(len(one.values) for one in share) for share in shares]
    for counts in (
        [len(share) for share in shares],
        [kind[1] for kind in kinds],
        [kind[2] for kind in kinds],
    ):
        assert max(counts) - min(counts) <= 1


def test_what_a_process_computes_does_not_depend_on_positions() -> None:
    first = [*share_of(WORK, 0, 4)]
    assert [*share_of(WORK[::-1], 0, 4)] == first[::-1]
    assert first != WORK[::4]
