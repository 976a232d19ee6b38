"""Cut a global batch into the micro-batches of each process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dstrain.randomness import SampleKey


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
        ends_step = start == starts[-1]
        yield MicroBatch(keys, weights, len(samples), ends_step)
