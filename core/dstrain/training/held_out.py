"""Leave samples out of training: those that are held out, and rows without any."""

import numpy as np
from numpy.typing import ArrayLike

from dstrain.errors import UsageError
from dstrain.randomness import digest
from dstrain.training.batching import SKIPPED, Groups, SampleIds, as_sample_ids


def with_skipped_rows(
    groups: ArrayLike, sample_ids: ArrayLike, rows: int
) -> tuple[Groups, SampleIds]:
    """Add a sample of the group `SKIPPED` for each of the table's rows that has none,
    so that others are drawn in the order of the whole table; return groups and (row,
    chunk) of all.
    """
    own_groups = np.asarray(groups, np.int32)
    own_ids = as_sample_ids(sample_ids)
    missing = np.flatnonzero(np.bincount(own_ids[:, 0], minlength=rows) == 0)
    if not len(missing):
        # Columns of a file stay in it.
        return own_groups, own_ids
    skipped = np.stack([missing, np.zeros_like(missing)], axis=1)
    all_groups = np.concatenate([own_groups, np.full(len(missing), SKIPPED, np.int32)])
    all_ids = np.concatenate([own_ids, skipped])
    in_order = np.lexsort((all_ids[:, 1], all_ids[:, 0]))
    return all_groups[in_order], all_ids[in_order]


def hold_out(
    groups: ArrayLike, sample_ids: ArrayLike, seed: int, fraction: float | None
) -> tuple[Groups, SampleIds]:
    """Return the groups in which samples that are held out count as `SKIPPED`, and the
    (row, chunk) of these; for no fraction, none are.

    Whether a row is held out depends on its number, the seed and the fraction alone:
    rows added to the end of a dataset change no other's part. Raises UsageError if no
    row is left on one of the sides.
    """
    numbers = np.asarray(groups, np.int32)
    ids = as_sample_ids(sample_ids)
    if fraction is None:
        return numbers, ids[:0]
    present = numbers != SKIPPED
    rows = np.unique(ids[present, 0])
    numbers_of_rows = (
        int.from_bytes(digest((seed,), "validation", int(row))[:8], "little")
        for row in rows
    )
    chosen = (number < fraction * 2**64 for number in numbers_of_rows)
    held_out_rows = rows[np.fromiter(chosen, bool, len(rows))]
    if len(held_out_rows) in (0, len(rows)):
        what = f"{fraction:g} chooses {len(held_out_rows):,} of {len(rows):,} rows for validation"
        other = "smaller" if len(held_out_rows) else "larger"
        reason = "each row is chosen by itself, by --seed"
        raise UsageError(
            "--validation_split", what, f"give a {other} fraction: {reason}"
        )
    is_chosen = present & np.isin(ids[:, 0], held_out_rows)
    return np.where(is_chosen, np.int32(SKIPPED), numbers), ids[is_chosen]
