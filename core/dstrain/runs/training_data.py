"""The samples that a run trains on, and those that it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dstrain.cache import CacheInfo, FeatureCache
from dstrain.console import get_logger
from dstrain.data import inputs_of
from dstrain.data.dataset import first_variants
from dstrain.randomness import SampleKey
from dstrain.runs.datasets.sizes import GroupSize, group_sizes
from dstrain.runs.feature_plan import open_plan
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, recorded
from dstrain.runs.setup import Setup
from dstrain.storage import Chosen
from dstrain.training import (
    CachedSamples,
    DecodedSamples,
    RepeatedRows,
    SampleSource,
    with_skipped_rows,
)
from dstrain.training.batching import Groups, SampleIds

logger = get_logger(__name__)


class PartRows(NamedTuple):
    """The rows of one of several datasets."""

    end: int
    """The row after the last one."""
    repeats: int
    loss_weight: float


@dataclass(frozen=True)
class TrainingData:
    """The samples of a dataset, skipped rows included."""

    setup: Setup
    """The run with this dataset."""
    source: SampleSource
    groups: Groups
    """Sample -> number of its signature; `SKIPPED` for a row without samples."""
    sample_ids: SampleIds
    """Sample -> its row and chunk."""
    input_sets: Sequence[frozenset[str]]
    """The sets of inputs that samples have."""
    cache_info: CacheInfo | None = None
    """The record of the run that filled the feature cache; stage 2 only."""
    sizes: Sequence[GroupSize] = ()
    """The sizes of the samples of each signature; () where stage 1 did not record them."""
    rows_of_parts: Sequence[int] = ()
    """The rows of each of the datasets."""

    @cached_property
    def parts(self) -> Sequence[PartRows]:
        """Return what holds for the rows of each of several datasets; () for one without
        options of its own.
        """
        if not self.setup.config.dataset:
            return ()
        ends = list(accumulate(self.rows_of_parts))
        options = [part.options for part in self.setup.parts]
        own = [(one.repeats, one.loss_weight) for one in options]
        # Stage 2 need not name the dataset of --dataset_base_path.
        own = [(1, 1.0)] * (len(ends) - len(own)) + own
        return [
            PartRows(end, repeats, weight)
            for end, (repeats, weight) in zip(ends, own, strict=True)
        ]

    @property
    def repeated(self) -> tuple[RepeatedRows, ...]:
        """Return how often the rows of each of several datasets are drawn."""
        return tuple(RepeatedRows(part.end, part.repeats) for part in self.parts)

    def loss_weight(self, key: SampleKey) -> float:
        """Return what the loss of a sample is multiplied by."""
        for part in self.parts:
            if key.row < part.end:
                return part.loss_weight
        return 1.0

    def name_row(self, row: int) -> str:
        """Name a row of the dataset in messages, as stage 1 recorded it."""
        info = self.cache_info
        if info is None or not isinstance(self.source, CachedSamples):
            return self.setup.name_row(row)
        rows = self.source.rows
        return self.setup.in_words(info.name_row(rows[rows.index(row)]))


@dataclass(frozen=True)
class ValidationSamples:
    """Samples that are not trained on."""

    data: TrainingData
    """Their dataset: that of training, or a second one."""
    sample_ids: SampleIds
    """(row, chunk) of each."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return len(self.sample_ids) > 0


def open_training_data(setup: Setup) -> TrainingData:
    """Open the samples: the rows of the dataset, or in stage 2 of the feature cache."""
    if setup.stage == "train":
        return _open_cached_rows(setup)
    dataset = setup.dataset
    first = dataset.first_variants
    used_inputs = [
        setup.plan(inputs_of(common)).used_inputs for common in dataset.signatures
    ]
    source = DecodedSamples(
        dataset.rows,
        Chosen(used_inputs, dataset.groups),
        dataset.sample_ids,
        dataset.damage,
        any(column.is_file for column in dataset.columns.values()),
        dataset.weights if len(first) < len(dataset.rows) else None,
    )
    groups, sample_ids = with_skipped_rows(
        dataset.groups[first], dataset.sample_ids[first], len(dataset.table.rows)
    )
    return TrainingData(
        setup,
        source,
        groups,
        sample_ids,
        dataset.input_sets,
        sizes=group_sizes(dataset),
        rows_of_parts=[
            len(part.setup.checked_dataset.table.rows) for part in setup.parts
        ],
    )


def _open_cached_rows(setup: Setup) -> TrainingData:
    cache = FeatureCache.open(setup.cache_path)
    source, info = open_plan(setup, cache)
    rows = source.rows
    if setup.config.on_long_prompt == "error":
        # Refused for a row whose cached values are of a prompt that was cut.
        log = LongPromptLog("error", lambda row: info.name_row(rows[rows.index(row)]))
        used = rows.using(recorded(cache.folder))
        note_recorded(log, cache.folder, ((row, [one]) for row, one in used))
    count = info.dataset["rows"]
    # Rows are in order: a new one begins wherever the number changes.
    present = rows.numbers["row"]
    skipped = count - (np.count_nonzero(np.diff(present)) + min(len(present), 1))
    if skipped:
        # Their files may have been mended since: nothing is recorded of them.
        which = setup.in_words("rows")
        logger.info(f"{skipped} of {count} {which} are skipped, as in stage 1")
    groups = np.asarray(rows.numbers["group"], np.int32)
    ids = rows.sample_ids
    if source.has_variants:
        first = first_variants(ids)
        groups, ids = groups[first], ids[first]
    groups, ids = with_skipped_rows(groups, ids, count)
    sizes = [GroupSize(*one) for one in info.sizes]
    return TrainingData(
        setup, source, groups, ids, source.input_sets, info, sizes, info.rows_of_parts
    )
