"""Rows are held out by their number and the seed alone, whole, and never all or none."""

import pytest
from dstrain import UsageError
from dstrain.training import SKIPPED, hold_out


def chosen(rows: int, seed: int, fraction: float) -> set[int]:
    """The rows that are held out of so many with one sample each."""
    _, held_out = hold_out(
        [0] * rows, [(row, 0) for row in range(rows)], seed, fraction
    )
    return {row for row, _ in held_out.tolist()}


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_as_many_rows_are_held_out_as_the_fraction_says(fraction: float) -> None:
    found = chosen(20_000, 0, fraction)
    assert abs(len(found) / 20_000 - fraction) < 0.01
    assert chosen(20_000, 1, fraction) != found


def test_more_rows_or_a_larger_fraction_only_add_rows() -> None:
    assert chosen(200, 3, 0.2) == {row for row in chosen(400, 3, 0.2) if row < 200}
    assert chosen(400, 3, 0.2) < chosen(400, 3, 0.4)
    assert chosen(20, 0, 0.2) == {1, 2, 12, 17, 18}  # as in older versions


def test_all_chunks_of_a_row_are_on_one_side_and_skipped_rows_on_neither() -> None:
    ids = [(row, chunk) for row in range(40) for chunk in range(2)]
    groups = [SKIPPED if row < 10 else row % 3 for row, _ in ids]
    trained, held_out = hold_out(groups, ids, 0, 0.3)
    rows = {row for row in chosen(40, 0, 0.3) if row >= 10}
    assert held_out.tolist() == [[*one] for one in ids if one[0] in rows]
    for group, kept, (row, _) in zip(groups, trained, ids, strict=True):
        assert kept == (SKIPPED if row in rows else group)


@pytest.mark.parametrize(
    ("fraction", "said"), [(1e-6, "0 of 3 .* larger"), (1 - 1e-6, "3 of 3 .* smaller")]
)
def test_a_fraction_that_leaves_no_row_is_refused(fraction: float, said: str) -> None:
    ids = [(row, 0) for row in range(4)]
    with pytest.raises(UsageError, match=f"(?s)--validation_split: .*{said}"):
        hold_out([0, 0, SKIPPED, 0], ids, 0, fraction)
