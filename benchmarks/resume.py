"""How long a run that resumes looks for its next batch, in the middle of an epoch of 1e9
draws: a million samples of seven signatures, drawn a thousand times.

The saved state has a position in the order, so that a chunk of draws is walked at most. The
floor is the same search from the beginning of the epoch; without a position, which only
states of older versions lack, the walk of all draws before is estimated from that of 1e7.
"""

import time
from collections.abc import Iterator

import click
import numpy as np
from dstrain.training import Order, Position
from report import table

SAMPLES = 1_000_000
REPEAT = 1_000
SIGNATURES = 7
SAMPLES_PER_STEP = 8
WALKED = 10_000_000
"""Draws that are walked without a position."""
HEAD = ("draws before", "with a position, s", "walked, s", "from the start, s")


def order_of(samples: int) -> Order:
    """Return the order of an epoch."""
    rows = np.arange(samples)
    ids = np.stack([rows, np.zeros_like(rows)], axis=1)
    groups = (rows % SIGNATURES).astype(np.int32)
    return Order(groups, REPEAT, SAMPLES_PER_STEP, 0, ids)


def seconds_to_batch(order: Order, batches: int, known: Position | None) -> float:
    """Return the time until the batch after so many is there."""
    since = time.perf_counter()
    next(order.global_batches(0, batches, known))
    return time.perf_counter() - since


def position_after(order: Order, batches: int) -> Position:
    """Return the position that a state after so many batches has."""
    passed: list[Position] = []
    next(order.global_batches(0, batches, on_position=passed.append))
    return passed[0]


def rows(samples: int, walked: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table."""
    order = order_of(samples)
    order.identity  # noqa: B018  # computed once, when a run starts
    start = seconds_to_batch(order, 0, None)
    near = walked // SAMPLES_PER_STEP
    known = position_after(order, near)
    walk = seconds_to_batch(order, near, None)
    with_position = seconds_to_batch(order, near, known)
    yield f"{walked:,}", f"{with_position:.3f}", f"{walk:.2f}", f"{start:.3f}"
    # The middle: the same draws wait as there, and as many batches were before.
    middle = order.draws // 2
    far = Position(
        known.order,
        known.epoch,
        known.batches + (middle - known.draws) // SAMPLES_PER_STEP,
        middle,
        known.queued,
    )
    with_position = seconds_to_batch(order, far.batches, far)
    estimated = f"{walk * middle / walked:.0f} (estimated)"
    yield f"{middle:,}", f"{with_position:.3f}", estimated, f"{start:.3f}"


@click.command(help=__doc__)
@click.option("--small", is_flag=True, help="A thousand samples.")
def main(small: bool) -> None:
    """Print a table."""
    print(table(HEAD, list(rows(*((1_000, 10_000) if small else (SAMPLES, WALKED))))))


if __name__ == "__main__":
    main()
