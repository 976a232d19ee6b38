"""Load samples from a dataset or from the feature cache, ahead of their use."""

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset as TorchDataset

from dstrain.cache import ABSENT, FeatureCache, PlanSamples
from dstrain.cache.addresses import Numbers
from dstrain.cache.plan_files import NO_LITERAL
from dstrain.console import get_logger, number_of
from dstrain.data import Cell, load_cell
from dstrain.data.cells import is_scaled
from dstrain.data.dataset import first_variants
from dstrain.errors import DstrainError, SystemFault, UsageError
from dstrain.graph import deserialize
from dstrain.randomness import SampleKey, choose
from dstrain.training.batching import MicroBatch, SampleIds, sample_index

logger = get_logger(__name__)

UNUSED = -2
"""The number of a value that a sample does not have."""
HUNG_AFTER = 1800.0
"""Seconds without a batch after which what loads counts as hung."""
AHEAD = 2
"""Decoded batches that wait to be used, at most, where a thread decodes."""
END_PATIENCE = 3.0
"""Seconds that the end waits for what loads. What reads from a dead disk cannot be ended."""
VARIANT = "variant"
"""The stream of the number that chooses a variant."""


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
    """Anything that returns samples by row and chunk (which sample of the row it is)."""

    def sample(
        self,
        row: int,
        chunk: int = 0,
        key: SampleKey | None = None,
    ) -> Sample:
        """Return one sample of one row.

        Args:
            row: The row.
            chunk: Which of its samples.
            key: Chooses one of its variants; None is the first.
        """


def chosen_variant(first: int, weights: Numbers, key: SampleKey | None) -> int:
    """Return the number of the variant that a key chooses.

    Args:
        first: The number of the first variant of the sample.
        weights: How probable each variant of the sample is.
        key: The key; None is the first variant.
    """
    if key is None or len(weights) == 1:
        return first
    return first + choose(key, VARIANT, weights.tolist())


@dataclass(frozen=True)
class DecodedSamples:
    """Samples decoded from a dataset."""

    rows: Sequence[Mapping[str, Cell]]
    """The inputs of each variant."""
    used_inputs: Sequence[Collection[str]]
    """The inputs of each variant that the run uses, and so decodes."""
    sample_ids: Sequence[tuple[int, int]] | SampleIds
    """(row, chunk) of each variant, in order."""
    at_row: Callable[[int, str, UsageError], UsageError]
    """Adds the place to an error in a cell: (row, input, error) -> error."""
    has_files: bool = True
    """Whether inputs are in files, so that decoding takes time."""
    weights: Numbers | None = None
    """How probable each variant is; None where each sample has one."""

    def sample(
        self,
        row: int,
        chunk: int = 0,
        key: SampleKey | None = None,
    ) -> Sample:
        """Decode the inputs used of one sample; raises UsageError for a damaged file."""
        index = sample_index(self.sample_ids, row, chunk)
        if self.weights is not None:
            end = sample_index(self.sample_ids, row, chunk + 1)
            index = chosen_variant(index, self.weights[index:end], key)
        cells = self.rows[index]
        values = {}
        for name in sorted(self.used_inputs[index]):
            try:
                values[name] = load_cell(cells[name])
            except UsageError as error:
                raise self.at_row(row, name, error) from error
        return Sample(values, frozenset(cells))


@dataclass(frozen=True)
class CachedSamples:
    """Samples read from a feature cache."""

    cache: FeatureCache
    rows: PlanSamples
    """The samples of its plan."""
    input_sets: Sequence[frozenset[str]]
    """The sets of inputs that a sample refers to by number."""
    entries: Mapping[str, Numbers]
    """Value -> its number in the cache for each sample, `ABSENT` where the cache lacks it,
    `UNUSED` where the sample does not have it.
    """
    has_variants: bool = False
    """Whether some samples have more than one variant."""

    @classmethod
    def of(
        cls,
        cache: FeatureCache,
        rows: PlanSamples,
        input_sets: Sequence[frozenset[str]],
    ) -> "CachedSamples":
        """Find the values of all samples, once and for all."""
        entries = {
            name: np.where(rows.has(name), cache.locate(addresses), UNUSED)
            for name, addresses in rows.stored.items()
        }
        has_variants = len(first_variants(rows.sample_ids)) < len(rows)
        return cls(cache, rows, input_sets, entries, has_variants)

    def lacking(self) -> Numbers:
        """Return the numbers of the samples of which the cache lacks a value."""
        lacks = np.zeros(len(self.rows), np.bool_)
        for numbers in self.entries.values():
            lacks |= numbers == ABSENT
        return np.flatnonzero(lacks)

    def sample(
        self,
        row: int,
        chunk: int = 0,
        key: SampleKey | None = None,
    ) -> Sample:
        """Read the values of one sample."""
        rows = self.rows
        index = rows.index(row, chunk)
        if self.has_variants:
            weights = rows.numbers["weight"][index : rows.index(row, chunk + 1)]
            index = chosen_variant(index, weights, key)
        values = {}
        for name, numbers in self.entries.items():
            number = int(numbers[index])
            if number != UNUSED:
                values[name] = self.cache.read_at(number)
        for name, codes in rows.codes.items():
            code = int(codes[index])
            if code != NO_LITERAL:
                values[name] = deserialize(rows.literals[name][code], {})
        return Sample(values, self.input_sets[rows.numbers["inputs"][index]])


class _Batches(TorchDataset[Any]):
    """Batches indexed by the micro-batches themselves."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, micro_batch: Any) -> Any:
        try:
            samples = [
                self.source.sample(key.row, key.chunk, key) for key in micro_batch.keys
            ]
        except DstrainError as error:
            # Raised in a worker, it would arrive as text; returned, it keeps its class.
            return error
        return Batch(micro_batch, samples)


def load_batches(
    source: SampleSource,
    micro_batches: Iterable[MicroBatch],
    workers: int,
    name_row: Callable[[int], str] = "row {}".format,
) -> Generator[Batch, None, None]:
    """Yield the batches in order, loaded by `workers` processes. If that is 0, a thread
    decodes files while the batches before are used; what is not in files is read here.

    Raises SystemFault naming a row where nothing is loaded for `HUNG_AFTER` seconds.
    """
    dataset = _Batches(source)
    waited_for: deque[MicroBatch] = deque()
    order = _noted(micro_batches, waited_for)
    scaled: set[int] = set()
    with ExitStack() as stack:
        batches: Iterator[Any]
        if workers:
            stack.enter_context(_killing_processes())
            batches = iter(_loader(dataset, order, workers))
        elif isinstance(source, DecodedSamples) and source.has_files:
            batches = stack.enter_context(_read_ahead(map(dataset.__getitem__, order)))
        else:
            # A cached sample is read in .1 ms, and a thread needs .3 to hand it over:
            # Python runs one thread at a time. Torch's loader would add 5 % to an empty
            # step, too.
            batches = map(dataset.__getitem__, order)
        try:
            while (batch := _next(batches, waited_for, name_row)) is not None:
                for key, sample in zip(
                    batch.micro_batch.keys, batch.samples, strict=True
                ):
                    # Said once, not in each epoch.
                    if not key.epoch and any(map(is_scaled, sample.values.values())):
                        scaled.add(key.row)
                yield batch
        finally:
            if scaled:
                rows = number_of(len(scaled), "row")
                logger.info(f"masks of 0 and 1, taken for 0 and 255: those of {rows}")


def _noted(
    micro_batches: Iterable[MicroBatch], waited_for: deque[MicroBatch]
) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        waited_for.append(micro_batch)
        yield micro_batch


def _next(
    batches: Iterator[Any],
    waited_for: deque[MicroBatch],
    name_row: Callable[[int], str],
) -> Batch | None:
    """Return the next batch, None after the last."""
    try:
        batch = next(batches, None)
    except (Empty, RuntimeError) as error:
        if not isinstance(error, Empty) and "DataLoader timed out" not in str(error):
            raise
        raise SystemFault(
            name_row(waited_for[0].keys[0].row),
            f"nothing was loaded for {HUNG_AFTER:.0f} seconds",
            "a process was stopped, or a disk or file server does not answer",
        ) from None
    if isinstance(batch, DstrainError):
        raise batch
    if batch is not None:
        waited_for.popleft()
    return batch


def _loader(
    dataset: _Batches, order: Iterator[MicroBatch], workers: int
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        sampler=order,
        batch_size=None,
        num_workers=workers,
        # Without one of its own, the loader draws from torch's global generator.
        generator=torch.Generator(),
        timeout=HUNG_AFTER,
        worker_init_fn=_ignore_stop_signals,
    )


def _ignore_stop_signals(worker: int) -> None:
    """Let a loading process live until the run ends it: launchers send a signal to every
    process, and torch takes one that ends for a crash, which ends the run unsaved.
    """
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


@contextmanager
def _killing_processes() -> Iterator[None]:
    """Kill the processes that are started inside and still there at its end, also where a
    signal came as they were started: a stopped one would be waited for.
    """
    others = set(multiprocessing.active_children())
    try:
        yield
    finally:
        # Torch raises an error when a process of its loader is killed, as long as it is
        # not joined. Windows has no such signal.
        number = getattr(signal, "SIGCHLD", None)
        here = threading.current_thread() is threading.main_thread()
        before = signal.signal(number, signal.SIG_DFL) if number and here else None
        own = set(multiprocessing.active_children()) - others
        for process in own:
            process.kill()
        for process in own:
            # One that waits for a dead disk may not even be killed.
            process.join(END_PATIENCE)
        if number and here:
            signal.signal(number, before)


@contextmanager
def _read_ahead(items: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Let a thread take items while those before are used, inside; an error comes in the
    place of the item that raised it, and Empty where one is waited for for too long.
    """
    ready: Queue[tuple[Any, BaseException | None]] = Queue(AHEAD)
    closed = threading.Event()

    def take() -> None:
        try:
            for item in items:
                ready.put((item, None))
                if closed.is_set():
                    return
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    def taken() -> Iterator[Any]:
        while True:
            item, error = ready.get(timeout=HUNG_AFTER)
            if error is not None:
                raise error
            yield item

    thread = threading.Thread(target=copy_context().run, args=(take,), daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        closed.set()
        with suppress(Empty):
            while True:  # the thread may wait for room
                ready.get_nowait()
        thread.join(END_PATIENCE)
