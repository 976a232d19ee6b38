"""Load samples from a dataset or from the feature cache, ahead of their use."""

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset as TorchDataset

from dstrain.console import get_logger, number_of
from dstrain.data.cells import is_scaled
from dstrain.errors import DstrainError, SystemFault
from dstrain.training.batching import MicroBatch
from dstrain.training.sample_sources import DecodedSamples, Sample, SampleSource

logger = get_logger(__name__)

HUNG_AFTER = 1800.0
"""Seconds without a batch after which what loads counts as hung."""
AHEAD = 2
"""Decoded batches that wait to be used, at most, where a thread decodes."""
END_PATIENCE = 3.0
"""Seconds that the end waits for what loads. What reads from a dead disk cannot be ended."""


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass."""

    micro_batch: MicroBatch
    samples: Sequence[Sample]


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
            loader = _loader(dataset, order, workers)
            batches = stack.enter_context(_in_processes(loader))
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
def _in_processes(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Let processes load inside, and kill those that are there at its end, also where a
    signal came as they were started: a stopped one would be waited for.
    """
    others = set(multiprocessing.active_children())
    own = set[Any]()
    try:
        try:
            batches = iter(loader)
        finally:
            own = set(multiprocessing.active_children()) - others
        yield batches
    finally:
        # Torch raises an error when a process of its loader is killed, as long as it is
        # not joined. Windows has no such signal.
        number = getattr(signal, "SIGCHLD", None)
        here = threading.current_thread() is threading.main_thread()
        before = signal.signal(number, signal.SIG_DFL) if number and here else None
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
