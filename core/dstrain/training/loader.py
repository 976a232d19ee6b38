"""Load samples from a dataset or from the feature cache, in worker processes if asked."""

import multiprocessing
import signal
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset as TorchDataset

from dstrain.cache.store import FeatureCache
from dstrain.data.cells import Cell, load_cell
from dstrain.errors import DstrainError, SystemFault, UsageError
from dstrain.graph.values import deserialize
from dstrain.training.batching import MicroBatch

POLL = 2.0
"""Seconds after which the wait for a batch looks for signals."""
HUNG_AFTER = 600.0
"""Seconds without a batch after which the processes that load count as hung."""


@dataclass(frozen=True)
class Sample:
    """One sample."""

    values: Mapping[str, Any]
    """Its inputs, or in stage 2 its cached values."""
    inputs: frozenset[str]
    """The names of the inputs that are present."""
    is_preprocessed: bool = False
    """Whether its values are the cached ones in an unsplit run, too."""


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass."""

    micro_batch: MicroBatch
    samples: Sequence[Sample]


class SampleSource(Protocol):
    """Anything that returns samples by row and chunk (the clip of the row's video)."""

    def sample(self, row: int, chunk: int = 0, check: bool = True) -> Sample:
        """Return one sample of one row; `check` as in `load_cell`."""


@dataclass(frozen=True)
class DecodedSamples:
    """Samples decoded from a dataset."""

    rows: Sequence[Mapping[str, Cell]]
    """The inputs of each sample."""
    used_inputs: Sequence[Collection[str]]
    """The inputs of each sample that the run uses, and so decodes."""
    sample_ids: Sequence[tuple[int, int]]
    """(row, chunk) of each sample, in order."""
    at_row: Callable[[int, str, UsageError], UsageError]
    """Adds the place to an error in a cell: (row, input, error) -> error."""

    def sample(self, row: int, chunk: int = 0, check: bool = True) -> Sample:
        """Decode the inputs used of one sample; raises UsageError for a damaged file."""
        index = bisect_left(self.sample_ids, (row, chunk))
        cells = self.rows[index]
        values = {}
        for name in sorted(self.used_inputs[index]):
            try:
                values[name] = load_cell(cells[name], check)
            except UsageError as error:
                raise self.at_row(row, name, error) from error
        return Sample(values, frozenset(cells))


@dataclass(frozen=True)
class CachedSamples:
    """Samples read from a feature cache."""

    cache: FeatureCache
    rows: Sequence[Mapping[str, Any]]
    """Lines of its plan: value -> {'at': address}, or the value itself as
    `values.serialize` wrote it.
    """
    input_sets: Sequence[frozenset[str]]
    """The sets of inputs that a line refers to by number."""
    sample_ids: Sequence[tuple[int, int]]
    """(row, chunk) of each sample, in order."""

    def sample(self, row: int, chunk: int = 0, check: bool = True) -> Sample:
        """Read the values of one sample, which are always checked."""
        line = self.rows[bisect_left(self.sample_ids, (row, chunk))]
        values = {}
        for name, form in line["values"].items():
            if "at" in form:
                values[name] = self.cache.read(form["at"])
            else:
                values[name] = deserialize(form, {})
        return Sample(values, self.input_sets[line["inputs"]])


class _Batches(TorchDataset[Any]):
    """Batches indexed by the micro-batches themselves."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, micro_batch: Any) -> Any:
        try:
            samples = [
                # Once for each file is enough.
                self.source.sample(key.row, key.chunk, key.epoch == key.repeat == 0)
                for key in micro_batch.keys
            ]
        except DstrainError as error:
            # Raised in a worker, it would arrive as text; returned, it keeps its class.
            return error
        return Batch(micro_batch, samples)


class StoppedWaiting(Exception):
    """A signal came while a batch was waited for."""


def load_batches(
    source: SampleSource,
    micro_batches: Iterable[MicroBatch],
    workers: int,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Batch]:
    """Yield the batches in order, loaded by `workers` processes, or by this one if that
    is 0.

    Raises SystemFault where processes load nothing for `HUNG_AFTER` seconds, and
    StoppedWaiting where a signal comes while they do.
    """
    dataset = _Batches(source)
    if not workers:
        # Torch's loader would add 5 % to an empty training step.
        batches: Iterator[Any] = map(dataset.__getitem__, micro_batches)
    else:
        loader = DataLoader(
            dataset,
            sampler=micro_batches,
            batch_size=None,
            num_workers=workers,
            # Without one of its own, the loader draws from torch's global generator.
            generator=torch.Generator(),
            timeout=POLL,
        )
        batches = _until_stopped(loader, is_stopping)
    try:
        for batch in batches:
            if isinstance(batch, DstrainError):
                raise batch
            yield batch
    finally:
        # The processes end now. Kept by the traceback of an error, they would go on
        # reading files that may be replaced by then.
        del batches


def _until_stopped(
    loader: Iterable[Any], is_stopping: Callable[[], bool]
) -> Iterator[Any]:
    """Yield what processes load; look at the time and at signals while they do not."""
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    processes = set(multiprocessing.active_children()) - others
    since = time.monotonic()
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except KeyboardInterrupt:
            _kill(processes)
            raise
        except RuntimeError as error:
            # The loader's own error of its timeout, after which it can be asked again.
            if not str(error).startswith("DataLoader timed out"):
                raise
            if is_stopping():
                _kill(processes)
                raise StoppedWaiting from None
            if time.monotonic() - since > HUNG_AFTER:
                _kill(processes)
                raise SystemFault(
                    "data loader",
                    f"its processes have loaded nothing for {HUNG_AFTER:.0f} seconds",
                    "a process was stopped, or a disk or file server does not answer",
                ) from None
        else:
            yield batch
            since = time.monotonic()


def _kill(processes: Collection[BaseProcess]) -> None:
    """Kill processes of the loader: a stopped one would be waited for at the end."""
    # Torch raises an error when a process of its loader is killed, as long as it is
    # not joined. Windows has no such signal.
    number = getattr(signal, "SIGCHLD", None)
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(number, signal.SIG_DFL) if number and here else None
    for process in processes:
        process.kill()
    for process in processes:
        # One that waits for a dead disk may not even be killed.
        process.join(timeout=1.0)
    if number and here:
        signal.signal(number, before)
