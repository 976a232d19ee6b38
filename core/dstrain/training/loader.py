"""Samples for a loader: rows decoded from the data set, or read back from the feature
store.
"""

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
    """Where samples come from, by row and by chunk: the clip of the row's video."""

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Return one sample of one row."""


@dataclass(frozen=True)
class Rows:
    """Samples of a data set; `reads` maps the inputs present to those that are decoded.

    first: row -> the number of its first sample, if rows have several or none
    (`order.row_starts`). damage: makes (row, input, error) the error that is raised
    for a cell that cannot be loaded; without it, it is the cell's own.
    """

    rows: Sequence[Mapping[str, Cell]]
    reads: Mapping[frozenset[str], frozenset[str]]
    first: Sequence[int] = ()
    damage: Callable[[int, str, UsageError], UsageError] | None = None

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Decode the inputs of one sample that the run reads."""
        return self.decode(
            row,
            chunk,
            self.reads[frozenset(self.rows[sample_index(self.first, row, chunk)])],
        )

    def decode(self, row: int, chunk: int, names: Iterable[str]) -> Sample:
        """Decode the named inputs of one sample; raises UsageError for a damaged file."""
        cells = self.rows[sample_index(self.first, row, chunk)]
        values = {}
        for name in sorted(names):
            try:
                values[name] = load_cell(cells[name])
            except UsageError as error:
                raise (
                    self.damage(row, name, error) if self.damage else error
                ) from error
        return Sample(values, frozenset(cells))


@dataclass(frozen=True)
class StoredRows:
    """Lines of a plan in a feature store: value -> {'at': address} or the value itself,
    as `values.flatten` wrote it.

    first: as in `Rows`.
    """

    store: FeatureCache
    rows: Sequence[Mapping[str, Any]]
    presence: Sequence[frozenset[str]]
    first: Sequence[int] = ()

    def sample(self, row: int, chunk: int = 0) -> Sample:
        """Read the values of one sample."""
        entry = self.rows[sample_index(self.first, row, chunk)]
        values = {
            name: self.store.read(form["at"]) if "at" in form else deserialize(form, {})
            for name, form in entry["values"].items()
        }
        return Sample(values, self.presence[entry["inputs"]])


class _Batches(TorchDataset[Batch]):
    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, micro: Any) -> Any:
        try:
            return Batch(
                micro, [self.source.sample(key.row, key.chunk) for key in micro.keys]
            )
        except DstrainError as error:
            return error  # a loader's process cannot raise it across


class _Order:
    """A sampler for a loader: the micro-batches themselves are the indices."""

    def __init__(self, make: Callable[[], Iterable[MicroBatch]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.make())


def load_batches(
    source: SampleSource, micros: Callable[[], Iterable[MicroBatch]], workers: int
) -> Iterator[Batch]:
    """Yield the batches of `micros` in order, loaded by `workers` processes (0: in this
    one).
    """
    if not workers:
        dataset = _Batches(source)
        yield from map(_checked, (dataset[micro] for micro in micros()))
        return
    loader = DataLoader(
        _Batches(source),
        sampler=_Order(micros),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_is,
        generator=torch.Generator(),
    )
    yield from map(_checked, loader)


def _checked(batch: Any) -> Batch:
    if isinstance(batch, DstrainError):
        raise batch
    assert isinstance(batch, Batch)
    return batch


def _as_is(batch: Any) -> Any:
    return batch
