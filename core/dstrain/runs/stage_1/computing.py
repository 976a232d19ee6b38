"""Compute what the feature cache lacks: processes divide the work, and in each files are
decoded, units run and values are written, all at the same time.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.addresses import ADDRESS
from dstrain.cache.backend.shards import look_again
from dstrain.console import progress_bar
from dstrain.data import Dataset
from dstrain.data.dataset import SampleCells
from dstrain.distributed import ProcessGroup
from dstrain.errors import UsageError
from dstrain.graph import LongPrompt, Step, noticing_long_prompts
from dstrain.models.functional import has_nan
from dstrain.pipeline import Pipeline
from dstrain.randomness import SampleKey
from dstrain.runs.long_prompts import LongPromptLog, record
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.keyed_samples import (
    AddressedSamples,
    KeyedSample,
    MissingWork,
    Work,
)
from dstrain.storage import Chosen
from dstrain.training import DecodedSamples, MicroBatch, load_batches

WAITING = 4
"""Samples that are computed and not yet in the shard in progress, at most: what a kill
loses beside that shard.
"""
VISIBLE = 120.0
"""Seconds after which every machine sees a file that another one has written: network
file systems remember what is in a folder for a minute."""


def compute(
    setup: Setup,
    pipeline: Pipeline,
    work: Sequence[Work],
    writer: ShardWriter,
    log: LongPromptLog,
    processes: ProcessGroup,
    does_all: bool = False,
) -> None:
    """Compute this process's share of the work, or all of it, sample by sample, and
    commit it shard by shard.

    What is computed is kept, whatever ends it.
    """
    share = work if does_all else share_of(work, processes.rank, processes.size)
    source = _decoded(setup, share)
    keys = (SampleKey(0, 0, 0, number) for number in range(len(share)))
    micro_batches = (MicroBatch((key,), (1.0,), 1, ends_step=True) for key in keys)
    loaded = load_batches(source, micro_batches, setup.config.dataset_num_workers)
    title = "data_process"
    if processes.size > 1:
        title += f" of {processes.size} processes"
    with (
        progress_bar(title, len(work)) as progress,
        writing(writer) as add,
        closing(loaded) as batches,
    ):
        for done, (one, batch) in enumerate(zip(share, batches, strict=True), 1):
            values = dict(batch.samples[0].values)
            with setup.dataset.errors_at(one.sample.sample_id[0]):
                for step in one.steps:
                    compute_step(
                        setup, pipeline, step, one.sample, values, log, processes.rank
                    )
            add({one.sample.addresses[name]: values[name] for name in one.values})
            # Other processes have as much of the work, and do it as fast.
            progress.update(len(work) * done // len(share) - progress.n)


def _decoded(setup: Setup, share: Sequence[Work]) -> DecodedSamples:
    """Return the samples of a share, numbered as rows, without their plans, which
    processes that load them cannot be given.
    """
    rows = array("q")
    cells = SampleCells()
    input_sets: dict[frozenset[str], int] = {}
    inputs = array("l")
    for one in share:
        rows.append(one.sample.sample_id[0])
        cells.append(one.sample.cells)
        inputs.append(input_sets.setdefault(one.inputs, len(input_sets)))
    columns = setup.dataset.columns
    files = {name for name, column in columns.items() if column.is_file}
    return DecodedSamples(
        cells,
        Chosen(list(input_sets), inputs),
        # Not by row and chunk, which all variants of a sample have.
        np.stack([np.arange(len(rows)), np.zeros(len(rows), np.int64)], axis=1),
        partial(_damage, setup.dataset, rows),
        any(used & files for used in input_sets),
    )


def _damage(
    dataset: Dataset, rows: Sequence[int], number: int, name: str, error: UsageError
) -> UsageError:
    """Return the error of an input that could not be loaded, with its place."""
    return dataset.damage(rows[number], name, error)


@contextmanager
def writing(writer: ShardWriter) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that adds values, by their addresses, to shards in a thread, as soon
    as there is room; at the end all that was added is committed.

    Both raise what the writer raises, as SystemFault for a full disk.
    """
    waiting: deque[Future[None]] = deque()

    def write(values: Mapping[str, Any]) -> None:
        for address, value in values.items():
            writer.add(address, value)

    def wait(most: int) -> None:
        while len(waiting) > most:
            waiting.popleft().result()

    def add(values: Mapping[str, Any]) -> None:
        wait(WAITING - 1)
        waiting.append(executor.submit(write, values))

    with ThreadPoolExecutor(1, "shards") as executor:
        try:
            yield add
        finally:
            wait(0)
            writer.flush()


def compute_step(
    setup: Setup,
    pipeline: Pipeline,
    step: Step,
    sample: KeyedSample,
    values: dict[str, Any],
    log: LongPromptLog,
    rank: int,
) -> None:
    """Run a unit for one sample; a prompt that it cuts is recorded with its outputs."""
    row, _ = sample.sample_id

    def notice(found: LongPrompt) -> None:
        if log.mode == "error":
            log.note(row, found)
        for name in step.outputs.values():
            if name in sample.addresses:
                record(setup.cache_path, rank, sample.addresses[name], found)

    with torch.no_grad(), noticing_long_prompts(notice):
        pipeline.run([step], values)
    for name, value in step.outputs.items():
        if has_nan(values[value]):
            raise UsageError(
                f"unit {step.unit.name}",
                f"output {name!r} contains NaN; it is not stored",
                *pipeline.damaged(step.unit.components),
            )


def share_of(work: Sequence[Work], rank: int, size: int) -> Sequence[Work]:
    """Return the part of the work that one of `size` processes does, in its order.

    Who computes a value depends on its address, not on its position: processes with the
    same work agree, in whatever order each has it. Work that runs the same units is
    dealt evenly, for it takes about the same time.
    """
    if size == 1:
        return work
    kinds: dict[tuple[str, ...], int] = {}
    numbers = array("q")
    addresses = bytearray()
    for one in work:
        units = tuple(step.unit.name for step in one.steps)
        numbers.append(kinds.setdefault(units, len(kinds)))
        # No two have a value in common, so the smallest address tells them apart.
        addresses += bytes.fromhex(
            min(one.sample.addresses[name] for name in one.values)
        )
    # Dealt in the order of addresses: a remainder of the address alone would leave one
    # process with half as much again as another where there are few samples.
    dealt = np.argsort(np.frombuffer(addresses, ADDRESS), kind="stable")
    order = {kind: place for place, kind in enumerate(sorted(kinds))}
    place_of = np.array([order[kind] for kind in kinds], np.int64)
    places = place_of[np.array(numbers, np.int64)]
    dealt = dealt[np.argsort(places[dealt], kind="stable")]
    return Chosen(work, np.sort(dealt[rank::size]))


def left_over(samples: AddressedSamples, folder: Path) -> MissingWork:
    """Return the work that is still to be done once every process has done its share.

    There is some only if they did not see the same files in the cache when it was
    divided.
    """
    end = time.monotonic() + VISIBLE
    while True:
        work = samples.missing_from(FeatureCache.open(folder))
        if not work or time.monotonic() > end:
            return work
        look_again(folder)
        time.sleep(1.0)
