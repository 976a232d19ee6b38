"""What a dry run finds out of the rows of a dataset: from the feature cache, where it has
them, or else from the metadata, row by row.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dstrain.cache import is_cache
from dstrain.cache.in_use import reading
from dstrain.console import get_logger, number_of
from dstrain.data import Dataset, Table
from dstrain.data.row_checks import check_rows, read_table, without_absent
from dstrain.errors import about_dataset
from dstrain.graph import Plan
from dstrain.runs.build import choose_validation, order_of
from dstrain.runs.checks.rows import log_left_out, warnings_of_rows
from dstrain.runs.datasets.sizes import (
    GroupSize,
    LargestSample,
    largest_sample,
    trained_sizes,
)
from dstrain.runs.datasets.sources import dataset_source, is_published
from dstrain.runs.feature_plan import check_configs
from dstrain.runs.launch.variables import world_size
from dstrain.runs.prompt_rows import plan_rows, recorded_plan, stored_rows
from dstrain.runs.resolve import of_stage
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.unchanged import Unchanged, find_unchanged, may_be_unchanged
from dstrain.runs.training_data import TrainingData, open_training_data
from dstrain.training import SKIPPED, CachedSamples, hold_out

logger = get_logger(__name__)


@dataclass(frozen=True)
class PlannedRows:
    """The rows of a dataset, as far as they can be known without decoding files."""

    plans: Sequence[Plan]
    """One for each set of inputs."""
    prompt_plans: Sequence[Plan] = ()
    """The plans of the rows that plugins add."""
    place: Path | None = None
    """Where its rows are; None if that is not known."""
    count: int = 0
    """Rows; 0 if there are none here."""
    held_out: int = 0
    """Rows among these that are for validation."""
    steps_per_epoch: int | None = None
    """If it is known exactly."""
    is_cached: bool = False
    """Whether stage 1 has nothing to compute of it."""
    largest: LargestSample | None = None
    """Its largest sample, if it is known."""
    sizes: Sequence[GroupSize] = ()
    """The sizes of the samples of each signature, as far as they are known."""
    dataset: Dataset | None = None
    """Its samples, where rows were read."""
    data: TrainingData | None = None
    """In stage 2 the samples of the feature cache."""

    def in_words(self) -> str:
        """Say how many rows there are, and where; '' if it is not known."""
        if not self.count:
            return f"rows in {self.place}" if self.place else ""
        return f"{number_of(self.count, 'row')} in {self.place}"


def planned_rows(setup: Setup, absent: list[str]) -> list[PlannedRows]:
    """Return what is known of the dataset, and of the second one if there is one.

    Raises what the run raises before it computes anything; files that are absent are
    added to `absent`.
    """
    if setup.config.runs_both_stages:
        return _of_both_stages(setup, absent)
    # Of rows that are listed, each is read.
    is_listed = setup.config.json
    if setup.stage == "data_process" and not is_listed and may_be_unchanged(setup):
        found = find_unchanged(setup, may_fetch=False)
        if found:
            return [_of_unchanged(one) for one in found]
    return [
        _of_cache(one)
        if one.stage == "train" and is_cache(one.cache_path)
        else _of_table(one, absent)
        for one in setup.datasets
    ]


def _of_both_stages(setup: Setup, absent: list[str]) -> list[PlannedRows]:
    """Take the rows of stage 1, and the exact steps of stage 2 if the cache has all."""
    stage_1 = of_stage(setup, "data_process")
    found = (
        find_unchanged(stage_1, may_fetch=False)
        if not setup.config.json and may_be_unchanged(stage_1)
        else []
    )
    if not found:
        return [_of_table(one, absent) for one in setup.datasets]
    cached = [_of_cache(one) for one in of_stage(setup, "train").datasets]
    return [
        replace(
            _of_unchanged(one),
            held_out=rows.held_out,
            steps_per_epoch=rows.steps_per_epoch,
            sizes=rows.sizes,
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
        [recorded_plan(setup, line) for line in info.prompt_rows],
        found.source.path,
        count,
        _held_out(setup, range(count)),
        is_cached=True,
        largest=None if largest is None else LargestSample(**largest),
        sizes=[GroupSize(*one) for one in info.sizes],
    )


def _of_cache(setup: Setup) -> PlannedRows:
    """Open the samples as stage 2 does."""
    # As a reader: what it looks at is not removed meanwhile.
    with reading(setup.cache_path):
        data = open_training_data(setup)
        plans = [setup.plan(inputs) for inputs in sorted(data.input_sets, key=sorted)]
        prompts = []
        if data.cache_info is not None and isinstance(data.source, CachedSamples):
            check_configs(data.cache_info, setup.find(plans, []))
            cached = stored_rows(setup, data.source.cache, data.cache_info.prompt_rows)
            prompts = [row.plan for row in cached]
    groups, validation = choose_validation(setup, data)
    order = order_of(setup, data, groups, world_size(os.environ))
    rows = np.unique(data.sample_ids[data.groups != SKIPPED, 0])
    held_out = 0 if setup.validation else len(np.unique(validation.sample_ids[:, 0]))
    return PlannedRows(
        plans,
        prompts,
        setup.config.dataset_base_path or setup.cache_path,
        len(rows),
        held_out,
        order.steps_per_epoch,
        sizes=trained_sizes(order, data.sizes),
        data=data,
    )


def _of_table(setup: Setup, absent: list[str]) -> PlannedRows:
    """Check the rows of the dataset whose files are here."""
    config = setup.config
    base = config.dataset_base_path
    has_cache = config.feature_cache is not None or base is not None
    if setup.stage == "train" and has_cache:
        absent.append(
            f"{setup.cache_path} is not a feature cache yet: stage 1 fills it"
        )
    source = dataset_source(config)
    if source is None:
        if base is not None and setup.stage != "train" and is_published(base):
            absent.append(f"dataset {base} is not on this machine: a run downloads it")
        place = base if setup.is_validation else None
        return PlannedRows([setup.plan(setup.all_inputs())], place=place)
    rows: list[int] = []
    first = 0
    is_whole = True
    for part in setup.parts:
        with about_dataset(part.options.name or setup.dataset_name):
            whole, table, lacks_files = _check_part(part.setup, absent)
        bad = {fault.row for fault in whole.faults}
        rows += [first + row for row in range(len(whole.rows)) if row not in bad]
        first += len(whole.rows)
        is_whole &= not lacks_files
        if table is None:
            plans = [setup.plan(setup.all_inputs())]
            held_out = _held_out(setup, rows)
            return PlannedRows(plans, (), source.path, len(rows), held_out)
    log_left_out(setup)
    is_skipping = config.on_bad_sample == "skip"
    # To skip rows, every file is decoded.
    dataset = setup.checked_dataset if is_skipping else setup.dataset
    vars(setup)["dataset"] = dataset
    for line in warnings_of_rows(setup) if is_whole else ():
        logger.warning(line)
    found = PlannedRows(
        [setup.plan(inputs) for inputs in dataset.input_sets],
        [row.plan for row in plan_rows(setup)],
        source.path,
        len(rows),
        _held_out(setup, rows),
        largest=largest_sample(dataset, setup.name_row),
        dataset=dataset,
    )
    if not is_whole or is_skipping:
        return found
    return _with_steps(setup, found)


def _check_part(setup: Setup, absent: list[str]) -> tuple[Table, Dataset | None, bool]:
    """Check the rows of one dataset whose files are here.

    Returns its table, the dataset if any row is left, and whether files are missing.
    """
    whole = read_table(setup.data_config, setup.spec.inputs)
    table, missing = without_absent(whole, setup.data_config, setup.spec.inputs)
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        absent.append(f"{whole.path}: {missing[0]}{others}")
        if len(table.rows) <= len({fault.row for fault in table.faults}):
            if setup.config.on_bad_sample == "error":
                table.refuse(table.faults)
            return whole, None, True
    dataset = check_rows(
        table, setup.data_config, setup.spec.inputs, setup.check_inputs
    )
    vars(setup)["checked_dataset"] = dataset
    return whole, dataset, bool(missing)


def _with_steps(setup: Setup, rows: PlannedRows) -> PlannedRows:
    """Add the steps of an epoch and the sizes of what is trained on."""
    data = open_training_data(setup)
    groups = data.groups
    if setup.validation is None:
        groups, _ = choose_validation(setup, data)
    order = order_of(setup, data, groups, world_size(os.environ))
    sizes = trained_sizes(order, data.sizes)
    return replace(rows, steps_per_epoch=order.steps_per_epoch, sizes=sizes)


def _held_out(setup: Setup, rows: Sequence[int]) -> int:
    """Return how many of these rows are for validation."""
    if not rows:
        return 0
    config = setup.config
    groups = np.zeros(len(rows), np.int32)
    ids = np.stack([rows, np.zeros(len(rows), np.int64)], axis=1)
    return len(hold_out(groups, ids, config.seed, config.validation_split)[1])
