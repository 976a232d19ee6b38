"""Samples for a loader: rows decoded from the data set, or read back from the feature store."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dstrain.dataset import Cell, load_cell
from dstrain.errors import DstrainError
from dstrain.module import Batch, Sample
from dstrain.order import MicroBatch
from dstrain.store import FeatureStore
from dstrain.values import unflatten


class Source(Protocol):
    """Where samples come from, by row."""

    def sample(self, row: int) -> Sample:
        """Return the sample of one row."""


@dataclass(frozen=True)
class Rows:
    """Rows of a data set; `reads` maps the inputs present to those that are decoded."""

    rows: Sequence[Mapping[str, Cell]]
    reads: Mapping[frozenset[str], frozenset[str]]

    def sample(self, row: int) -> Sample:
        """Decode the inputs of one row that the run reads."""
        return self.decode(row, self.reads[frozenset(self.rows[row])])

    def decode(self, row: int, names: Iterable[str]) -> Sample:
        """Decode the named inputs of one row."""
        cells = self.rows[row]
        return Sample({name: load_cell(cells[name]) for name in sorted(names)}, frozenset(cells))


@dataclass(frozen=True)
class StoredRows:
    """Rows of a plan in a feature store: value -> {'at': address} or the value itself, as `values.flatten` wrote it."""

    store: FeatureStore
    rows: Sequence[Mapping[str, Any]]
    presence: Sequence[frozenset[str]]

    def sample(self, row: int) -> Sample:
        """Read the values of one row."""
        entry = self.rows[row]
        values = {
            name: self.store.read(form["at"]) if "at" in form else unflatten(form, {})
            for name, form in entry["values"].items()
        }
        return Sample(values, self.presence[entry["inputs"]])


class _Batches(TorchDataset[Batch]):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, micro: Any) -> Any:
        try:
            return Batch(micro, [self.source.sample(key.row) for key in micro.keys])
        except DstrainError as error:
            return error  # a loader's process cannot raise it across


class _Order:
    """A sampler for a loader: the micro-batches themselves are the indices."""

    def __init__(self, make: Callable[[], Iterable[MicroBatch]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.make())


def load_batches(source: Source, micros: Callable[[], Iterable[MicroBatch]], workers: int) -> Iterator[Batch]:
    """Yield the batches of `micros` in order, loaded by `workers` processes (0: in this one)."""
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
