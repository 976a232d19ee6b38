"""Choose the rows that are held out of training, for validation."""

from collections.abc import Sequence

from dstrain.errors import UsageError
from dstrain.randomness import digest
from dstrain.training.batching import SKIPPED

FLAG = "--validation_split"


def is_held_out(row: int, seed: int, fraction: float) -> bool:
    """Return whether a row is held out: it depends on nothing but these, so that rows
    added to the end of a dataset change no other's part.
    """
    number = int.from_bytes(digest((seed,), "validation", row)[:8], "little")
    return number < fraction * 2**64


def hold_out(
    groups: Sequence[int],
    sample_ids: Sequence[tuple[int, int]],
    seed: int,
    fraction: float | None,
) -> tuple[Sequence[int], list[tuple[int, int]]]:
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
    if fraction is None:
        return groups, []
    trained = list(groups)
    held_out = []
    for index, (row, chunk) in enumerate(sample_ids):
        if groups[index] != SKIPPED and is_held_out(row, seed, fraction):
            trained[index] = SKIPPED
            held_out.append((row, chunk))
    rows = {
        row
        for group, (row, _) in zip(groups, sample_ids, strict=True)
        if group != SKIPPED
    }
    chosen = len({row for row, _ in held_out})
    if chosen in (0, len(rows)):
        what = f"{fraction:g} chooses {chosen} of {len(rows)} rows for validation"
        other = "larger" if chosen == 0 else "smaller"
        reason = "each row is chosen by itself, by --seed"
        raise UsageError(FLAG, what, f"give a {other} fraction: {reason}")
    return trained, held_out
