"""Read samples from a dataset or from the feature cache."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dstrain.cache import FeatureCache, PlanSamples
from dstrain.cache.addresses import ABSENT, Numbers
from dstrain.cache.backend.plan_files import NO_LITERAL
from dstrain.data import Cell, load_cell
from dstrain.data.dataset import first_variants
from dstrain.errors import UsageError
from dstrain.graph import deserialize
from dstrain.randomness import SampleKey, choose
from dstrain.training.batching import SampleIds, sample_index

UNUSED = -2
"""The number of a value that a sample does not have."""
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


class SampleSource(Protocol):
    """Anything that returns samples by row and chunk (which sample of the row it is)."""

    def sample(self, row: int, chunk: int = 0, key: SampleKey | None = None) -> Sample:
        """Return one sample of a row; the key chooses one of its variants, None the
        first.
        """


def chosen_variant(first: int, weights: Numbers, key: SampleKey | None) -> int:
    """Return the number of the variant that a key chooses by the variants' weights,
    from the first one's number on; None is the first.
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

    def sample(self, row: int, chunk: int = 0, key: SampleKey | None = None) -> Sample:
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

    def sample(self, row: int, chunk: int = 0, key: SampleKey | None = None) -> Sample:
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
