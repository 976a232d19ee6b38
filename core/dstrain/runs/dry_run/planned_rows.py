"""What a dry run finds out of the rows of a dataset: from the feature cache, where it has
them, or else from the metadata, row by row.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dstrain.cache.in_use import reading
from dstrain.cache.store import MARKER
from dstrain.data.dataset import Dataset
from dstrain.data.metadata import read_metadata
from dstrain.data.row_checks import check_rows, without_absent
from dstrain.graph.plan import Plan
from dstrain.runs.build import choose_validation, open_training_data
from dstrain.runs.feature_plan import check_configs
from dstrain.runs.launch.variables import world_size
from dstrain.runs.memory.samples import LargestSample, largest_sample
from dstrain.runs.reports.preview_plans import (
    plan_previews,
    recorded_plan,
    stored_previews,
)
from dstrain.runs.resolve import of_stage
from dstrain.runs.setup import Setup, metadata_path
from dstrain.runs.stage_1.unchanged import Unchanged, find_unchanged, may_be_unchanged
from dstrain.runs.training_run import TrainingData
from dstrain.training.batching import SKIPPED, Order
from dstrain.training.held_out import hold_out
from dstrain.training.loader import CachedSamples


@dataclass(frozen=True)
class PlannedRows:
    """The rows of a dataset, as far as they can be known without decoding files."""

    plans: Sequence[Plan]
    """One for each set of inputs."""
    preview_plans: Sequence[Plan] = ()
    place: Path | None = None
    """Where its rows are; None if that is not known."""
    count: int = 0
    """Rows; 0 if there are none here."""
    held_out: int = 0
    """Of these, rows for validation."""
    steps_per_epoch: int | None = None
    """If it is known exactly."""
    is_cached: bool = False
    """Whether stage 1 has nothing to compute of it."""
    largest: LargestSample | None = None
    """Its largest sample, if it is known."""
    data: TrainingData | None = None
    """In stage 2 the samples of the feature cache."""

    def in_words(self) -> str:
        """Say how many rows there are, and where; '' if it is not known."""
        if not self.count:
            return f"rows in {self.place}" if self.place else ""
        return f"{self.count} rows in {self.place}"


def planned_rows(setup: Setup, absent: list[str]) -> list[PlannedRows]:
    """Return what is known of the dataset, and of the second one if there is one.

    Raises what the run raises before it computes anything; files that are absent are
    added to `absent`.
    """
    if setup.config.runs_both_stages:
        return _of_both_stages(setup, absent)
    if setup.stage == "data_process" and may_be_unchanged(setup):
        found = find_unchanged(setup, may_fetch=False)
        if found:
            return [_of_unchanged(one) for one in found]
    return [
        _of_cache(one)
        if one.stage == "train" and (one.cache_path / MARKER).exists()
        else _of_table(one, absent)
        for one in setup.datasets
    ]


def _of_both_stages(setup: Setup, absent: list[str]) -> list[PlannedRows]:
    """Take the rows of stage 1, and the exact steps of stage 2 if the cache has all."""
    stage_1 = of_stage(setup, "data_process")
    found = (
        find_unchanged(stage_1, may_fetch=False) if may_be_unchanged(stage_1) else []
    )
    if not found:
        return [_of_table(one, absent) for one in setup.datasets]
    cached = [_of_cache(one) for one in of_stage(setup, "train").datasets]
    return [
        replace(
            _of_unchanged(one),
            held_out=rows.held_out,
            steps_per_epoch=rows.steps_per_epoch,
        )
        for one, rows in zip(found, cached, strict=True)
    ]


def _of_unchanged(found: Unchanged) -> PlannedRows:
    """Take what stage 1 recorded when it filled the cache."""
    setup, info = found.setup, found.info
    largest = info.repeatable["largest"]
    count = int(info.dataset["rows"])
    return PlannedRows(
        [setup.plan(frozenset(names)) for names in info.inputs],
        [recorded_plan(setup, line) for line in info.previews],
        metadata_path(setup.config),
        count,
        _held_out(setup, np.arange(count)),
        is_cached=True,
        largest=None if largest is None else LargestSample(**largest),
    )


def _of_cache(setup: Setup) -> PlannedRows:
    """Open the samples as stage 2 does."""
    # As a reader: what it looks at is not removed meanwhile.
    with reading(setup.cache_path):
        data = open_training_data(setup)
        plans = [setup.plan(inputs) for inputs in sorted(data.input_sets, key=sorted)]
        previews = []
        if data.cache_info is not None and isinstance(data.source, CachedSamples):
            check_configs(data.cache_info, setup.find(plans, []))
            cached = stored_previews(setup, data.source.cache, data.cache_info.previews)
            previews = [preview.plan for preview in cached]
    groups, validation = choose_validation(setup, data)
    order = Order(
        groups,
        setup.config.dataset_repeat,
        samples_per_step(setup),
        setup.config.seed,
        data.sample_ids,
    )
    rows = np.unique(data.sample_ids[data.groups != SKIPPED, 0])
    held_out = 0 if setup.validation else len(np.unique(validation.sample_ids[:, 0]))
    return PlannedRows(
        plans,
        previews,
        setup.config.dataset_base_path or setup.cache_path,
        len(rows),
        held_out,
        order.steps_per_epoch,
        data=data,
    )


def _of_table(setup: Setup, absent: list[str]) -> PlannedRows:
    """Check the rows of the dataset whose files are here."""
    if setup.stage == "train" and _trains_from_cache(setup):
        folder = setup.cache_path
        absent.append(f"{folder} is not a feature cache yet: stage 1 fills it")
    path = metadata_path(setup.config)
    if path is None:
        place = setup.config.dataset_base_path if setup.is_validation else None
        return PlannedRows([setup.plan(setup.all_inputs())], place=place)
    table = read_metadata(path)
    bad = {fault.row for fault in table.faults}
    rows = np.setdiff1d(np.arange(len(table.rows)), [*bad])
    table, missing = without_absent(table, setup.data_config, setup.spec.inputs)
    dataset: Dataset | None = None
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        absent.append(f"{path}: {missing[0]}{others}")
    is_any_left = len(table.rows) > len({fault.row for fault in table.faults})
    if missing and not is_any_left:
        if setup.config.on_bad_sample == "error":
            table.refuse(table.faults)
    else:
        dataset = check_rows(
            table, setup.data_config, setup.spec.inputs, setup.check_inputs
        )
    held_out = _held_out(setup, rows)
    if dataset is None:
        plans = [setup.plan(setup.all_inputs())]
        return PlannedRows(plans, (), path, len(rows), held_out)
    # It is checked already, and by no file's content.
    vars(setup)["dataset"] = dataset
    return PlannedRows(
        [setup.plan(inputs) for inputs in dataset.input_sets],
        [preview.plan for preview in plan_previews(setup)],
        path,
        len(rows),
        held_out,
        largest=largest_sample(setup, dataset),
    )


def _trains_from_cache(setup: Setup) -> bool:
    config = setup.config
    return config.feature_cache is not None or config.dataset_base_path is not None


def _held_out(setup: Setup, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return how many of these rows are for validation."""
    if not len(rows):
        return 0
    config = setup.config
    ids = np.stack([rows, np.zeros_like(rows)], axis=1)
    groups = np.zeros(len(rows), np.int32)
    return len(hold_out(groups, ids, config.seed, config.validation_split)[1])


def samples_per_step(setup: Setup) -> int:
    """Return the samples of an optimizer step, those of all processes."""
    config = setup.config
    processes = world_size(os.environ)
    return config.batch_size * config.gradient_accumulation_steps * processes
