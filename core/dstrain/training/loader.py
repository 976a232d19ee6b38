"""Load samples from a dataset or from the feature cache, in worker processes if asked."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dstrain.cache.store import FeatureCache
from dstrain.data.cells import Cell, load_cell
from dstrain.errors import DstrainError, UsageError
from dstrain.graph.values import deserialize
from dstrain.training.batch import Batch, Sample
from dstrain.training.order import MicroBatch, sample_index


class SampleSource(Protocol):
    """Anything that returns samples by row and chunk (the clip of the row's video)."""

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Return one sample of one row."""


@dataclass(frozen=True)
class DecodedSamples:
    """Samples decoded from a dataset."""

    rows: Sequence[Mapping[str, Cell]]
    used_inputs: Mapping[frozenset[str], frozenset[str]]
    """Inputs present in a row -> those of them that the run uses, and so decodes."""
    row_starts: Sequence[int] = ()
    """Row -> index of its first sample (`order.row_starts`); empty if each row has one."""
    at_row: Callable[[int, str, UsageError], UsageError] | None = None
    """Adds the place to an error in a cell: (row, input, error) -> error."""

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Decode those inputs of one sample that the run uses."""
        cells = self.rows[sample_index(self.row_starts, row, chunk)]
        return self.decode(row, chunk, self.used_inputs[frozenset(cells)])

    def decode(self, row: int, chunk: int, names: Iterable[str]) -> Sample:
        """Decode the named inputs of one sample; raises UsageError for a damaged file."""
        cells = self.rows[sample_index(self.row_starts, row, chunk)]
        values = {}
        for name in sorted(names):
            try:
                values[name] = load_cell(cells[name])
            except UsageError as error:
                if self.at_row is None:
                    raise
                raise self.at_row(row, name, error) from error
        return Sample(values, frozenset(cells))


@dataclass(frozen=True)
class CachedSamples:
    """Samples read from a feature cache."""

    store: FeatureCache
    rows: Sequence[Mapping[str, Any]]
    """Lines of its plan: value -> {'at': address}, or the value itself as
    `values.serialize` wrote it.
    """
    presence: Sequence[frozenset[str]]
    """The sets of inputs that a line refers to by number."""
    row_starts: Sequence[int] = ()
    """As in `DecodedSamples`."""

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Read the values of one sample."""
        line = self.rows[sample_index(self.row_starts, row, chunk)]
        values = {}
        for name, form in line["values"].items():
            if "at" in form:
                values[name] = self.store.read(form["at"])
            else:
                values[name] = deserialize(form, {})
        return Sample(values, self.presence[line["inputs"]])


class _Batches(TorchDataset[Any]):
    """Batches indexed by the micro-batches themselves."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, micro_batch: Any) -> Any:
        try:
            keys = micro_batch.keys
            samples = [self.source.sample(key.row, key.chunk) for key in keys]
        except DstrainError as error:
            # Raised in a worker, it would arrive as text; returned, it keeps its class.
            return error
        return Batch(micro_batch, samples)


def load_batches(
    source: SampleSource,
    micro_batches: Iterable[MicroBatch],
    workers: int,
) -> Iterator[Batch]:
    """Yield the batches in order, loaded by `workers` processes, or by this one if that
    is 0.
    """
    dataset = _Batches(source)
    loaded: Iterable[Any]
    if workers:
        loaded = DataLoader(
            dataset,
            sampler=micro_batches,
            batch_size=None,
            num_workers=workers,
            # Without one of its own, the loader draws from torch's global generator.
            generator=torch.Generator(),
        )
    else:
        loaded = map(dataset.__getitem__, micro_batches)
    for batch in loaded:
        if isinstance(batch, DstrainError):
            raise batch
        yield batch
