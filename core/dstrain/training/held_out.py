"""Choose the rows that are held out of training, for validation."""

import numpy as np
from numpy.typing import ArrayLike

from dstrain.errors import UsageError
from dstrain.randomness import digest
from dstrain.training.batching import (
    SKIPPED,
    Groups,
    SampleIds,
    as_groups,
    as_sample_ids,
)

FLAG = "--validation_split"


def is_held_out(row: int, seed: int, fraction: float) -> bool:
    """Return whether a row is held out: it depends on nothing but these, so that rows
    added to the end of a dataset change no other's part.
    """
    number = int.from_bytes(digest((seed,), "validation", row)[:8], "little")
    return number < fraction * 2**64


def hold_out(
    groups: ArrayLike,
    sample_ids: ArrayLike,
    seed: int,
    fraction: float | None,
) -> tuple[Groups, SampleIds]:
    """Return the groups in which samples that are held out count as skipped, and the
    (row, chunk) of these.

    So the other samples are drawn in the order of the whole table. Raises UsageError if
    no row is left on one of the sides.

    Args:
        groups: Sample -> number of its signature, or `SKIPPED`.
        sample_ids: (row, chunk) of each sample, in order.
        seed: The seed of the run.
        fraction: How many of the rows are held out; None for none.
    """
    numbers = as_groups(groups)
    ids = as_sample_ids(sample_ids)
    if fraction is None:
        return numbers, ids[:0]
    present = numbers != SKIPPED
    rows = np.unique(ids[present, 0])
    chosen = (is_held_out(int(row), seed, fraction) for row in rows)
    held_out_rows = rows[np.fromiter(chosen, bool, len(rows))]
    if len(held_out_rows) in (0, len(rows)):
        what = f"{fraction:g} chooses {len(held_out_rows):,} of {len(rows):,} rows for validation"
        other = "smaller" if len(held_out_rows) else "larger"
        reason = "each row is chosen by itself, by --seed"
        raise UsageError(FLAG, what, f"give a {other} fraction: {reason}")
    is_chosen = present & np.isin(ids[:, 0], held_out_rows)
    return np.where(is_chosen, np.int32(SKIPPED), numbers), ids[is_chosen]
