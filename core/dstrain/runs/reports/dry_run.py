"""Describe what a run would do, and check what it would check, for `--dry_run`."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache.store import MARKER
from dstrain.config.fields import split_commas
from dstrain.config.options.train import options_affecting
from dstrain.console import redacted
from dstrain.data.dataset import Dataset
from dstrain.data.metadata import read_metadata
from dstrain.data.row_checks import check_rows, without_absent
from dstrain.errors import MissingFiles
from dstrain.graph.plan import Plan
from dstrain.pipeline.pipeline import Pipeline
from dstrain.runs.build import load_module, open_training_data, total_steps
from dstrain.runs.checkpoints.directory import refuse_unlisted
from dstrain.runs.checkpoints.resume import check_start
from dstrain.runs.feature_plan import check_configs
from dstrain.runs.launch.limits import refuse_unshardable
from dstrain.runs.launch.variables import world_size
from dstrain.runs.memory.facts import facts_of
from dstrain.runs.memory.planning import PlannedRun
from dstrain.runs.memory.report import report
from dstrain.runs.reports.preview_plans import plan_previews
from dstrain.runs.setup import Setup, metadata_path
from dstrain.runs.training_run import TrainingData
from dstrain.training.held_out import hold_out
from dstrain.training.module import TrainingModule


def as_summary(setup: Setup) -> str:
    """Describe the run on a page of text, with the files that are not on this machine.

    Checks what the run checks before it computes anything, in the same order, and
    raises what the run raises; only files that are absent are no error. Reads no
    weights, decodes no image and asks no hub.
    """
    absent: list[str] = []
    typed = setup.config
    setup = _without_absent_weights(setup, absent)
    _check_output(setup, absent)
    dataset = _dataset(setup, absent)
    plans, data = _plans(setup, dataset, absent)
    second = setup.validation
    if second is not None:
        more, _ = _plans(second, _dataset(second, absent), absent)
        plans += [one for one in more if one not in plans]
    if setup.sharding is not None:
        refuse_unshardable(setup, plans)
    loaded = _check_models(setup, plans, _preview_plans(setup, dataset), absent)
    length = _Length.of(setup)
    lines = ["", "this run", *length.lines(setup)]
    if loaded is None:
        lines += ["", "memory: not known, since no model files are given"]
    else:
        facts = facts_of(setup, plans, loaded, data, dataset)
        run = PlannedRun(setup, plans, facts, dataset, typed)
        lines += report(run, length.steps, length.per_epoch, length.rows)
    if absent:
        lines += ["", "to fetch", *(f"    {line}" for line in dict.fromkeys(absent))]
    return redacted("\n".join(lines) + "\n")


@dataclass(frozen=True)
class _Length:
    """How long a run is; rows with videos may give several samples."""

    rows: int
    """Rows of the dataset; 0 if there is none here."""
    held_out: int
    """Of these, rows for validation."""
    samples_per_step: int
    per_epoch: int | None
    """Steps of an epoch."""
    steps: int | None

    @classmethod
    def of(cls, setup: Setup) -> "_Length":
        config = setup.config
        rows = 0
        held_out = 0
        path = metadata_path(config)
        if path is not None:
            table = read_metadata(path)
            bad = {fault.row for fault in table.faults}
            good = np.setdiff1d(np.arange(len(table.rows)), [*bad])
            rows = len(good)
            ids = np.stack([good, np.zeros_like(good)], axis=1)
            groups = np.zeros(rows, np.int32)
            chosen = hold_out(groups, ids, config.seed, config.validation_split)[1]
            held_out = len(chosen)
        processes = world_size(os.environ)
        batch = config.batch_size * config.gradient_accumulation_steps * processes
        if not rows:
            return cls(0, 0, batch, None, config.max_steps)
        trained = rows - held_out
        per_epoch = math.ceil(trained * config.dataset_repeat / batch)
        return cls(rows, held_out, batch, per_epoch, total_steps(config, per_epoch))

    def lines(self, setup: Setup) -> Iterator[str]:
        """Yield rows and steps."""
        path = metadata_path(setup.config)
        if path is not None:
            yield f"    {self.rows} rows in {path} x {setup.config.dataset_repeat}"
        if self.held_out:
            yield f"    {self.held_out} of these for validation"
        second = setup.validation
        if second is not None:
            table = metadata_path(second.config)
            rows = "" if table is None else f"{len(read_metadata(table).rows)} "
            place = table or second.config.dataset_base_path
            yield f"    {rows}rows in {place} for validation"
        if setup.stage == "data_process":
            return
        yield f"    samples per step: {self.samples_per_step}"
        if self.rows:
            yield f"    {self.steps} steps, if each row is one sample and all have the same size"


def _without_absent_weights(setup: Setup, absent: list[str]) -> Setup:
    """Return the setup without the weights that flags name and that are not here."""
    config = setup.config
    for name in options_affecting("weights"):
        value = str(getattr(config, name) or "")
        missing = [path for path in split_commas(value) if not Path(path).exists()]
        absent += [f"--{name}: {path} does not exist" for path in missing]
        if missing:
            gone: dict[str, Any] = {name: None}
            config = replace(config, **gone)
    return replace(setup, config=config)


def _check_output(setup: Setup, absent: list[str]) -> None:
    """Refuse an output folder that the run refuses."""
    config = setup.config
    folder = config.output_path
    if folder is None or setup.stage == "data_process":
        return
    refuse_unlisted(folder)
    if config.resume not in (None, "auto") and not Path(str(config.resume)).exists():
        absent.append(f"--resume: {config.resume} does not exist")
        return
    check_start(config, folder)


def _dataset(setup: Setup, absent: list[str]) -> Dataset | None:
    """Check the rows of the dataset whose files are here; None without any."""
    path = metadata_path(setup.config)
    if path is None:
        return None
    table, missing = without_absent(
        read_metadata(path), setup.data_config, setup.spec.inputs
    )
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        absent.append(f"{path}: {missing[0]}{others}")
        if len(table.rows) == len({fault.row for fault in table.faults}):
            if setup.config.on_bad_sample == "error":
                table.refuse(table.faults)
            return None
    return check_rows(table, setup.data_config, setup.spec.inputs, setup.check_inputs)


def _plans(
    setup: Setup, dataset: Dataset | None, absent: list[str]
) -> tuple[list[Plan], TrainingData | None]:
    """Return the plans of the rows; of stage 2, from the feature cache, and its
    samples.
    """
    if setup.stage == "train":
        if setup.config.feature_cache is None and not setup.config.dataset_base_path:
            return [setup.plan(setup.all_inputs())], None
        folder = setup.cache_path
        if not (folder / MARKER).exists():
            absent.append(f"{folder} is not a feature cache yet: stage 1 fills it")
            return [setup.plan(setup.all_inputs())], None
        data = open_training_data(setup)
        plans = [setup.plan(inputs) for inputs in sorted(data.input_sets, key=sorted)]
        if data.cache_info is not None:
            check_configs(data.cache_info, setup.find(plans, []))
        return plans, data
    if dataset is None:
        return [setup.plan(setup.all_inputs())], None
    return [setup.plan(one) for one in dataset.input_sets], None


def _preview_plans(setup: Setup, dataset: Dataset | None) -> list[Plan]:
    """Return the plans of previews; none where the rows, which have sizes, are not here."""
    if dataset is None:
        return []
    # The dataset is checked already, and by no file's content.
    vars(setup)["dataset"] = dataset
    return [preview.plan for preview in plan_previews(setup)]


def _check_models(
    setup: Setup,
    plans: Sequence[Plan],
    preview_plans: Sequence[Plan],
    absent: list[str],
) -> Pipeline | TrainingModule | None:
    """Compare model files with their networks, and what is trained with these; return
    what the run loads, without memory, or None without model files.
    """
    if not setup.models:
        return None
    missing: list[MissingFiles] = []
    found = setup.find([*plans, *preview_plans], missing)
    absent += [f"{error.where}: {error.what}" for error in missing]
    trained = {name.partition(".")[0] for name in setup.trainables.components}
    if setup.stage == "data_process" or not trained <= found.configs.keys():
        return Pipeline.from_found(
            setup.family, setup.spec, found, setup.device, setup.dtype, empty=True
        )
    return load_module(setup, plans, found, TrainingModule, empty=True)
