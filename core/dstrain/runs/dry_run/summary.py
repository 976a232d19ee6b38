"""Describe what a run would do, and check what it would check, for `--dry_run`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import split_commas
from dstrain.config.lora_file import parse_preset
from dstrain.config.options import options_affecting
from dstrain.console import status
from dstrain.errors import MissingFiles
from dstrain.graph import Plan
from dstrain.pipeline import Pipeline
from dstrain.registry import Section
from dstrain.runs.checkpoints.directory import check_start, refuse_unlisted
from dstrain.runs.checks.flags import refuse_unshardable
from dstrain.runs.dry_run.dry_run_page import DryRun, RunLength
from dstrain.runs.dry_run.planned_rows import planned_rows
from dstrain.runs.dry_run.planned_run import PlannedRun
from dstrain.runs.loaded_module import load_module
from dstrain.runs.resolve import of_stage
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.unchanged import refuse_folder
from dstrain.training import TrainingModule


def plan_run(setup: Setup) -> "DryRun":
    """Find what the run would do, and the files that are not on this machine.

    Checks what the run checks before it computes anything, in the same order, and
    raises what the run raises; only files that are absent are no error. Reads no
    weights, decodes no image and asks no hub.
    """
    absent: list[str] = []
    typed = setup.config
    setup = _without_absent_weights(setup, absent)
    _check_output(setup, absent)
    rows, *second = planned_rows(setup, absent)
    plans: list[Plan] = []
    for one in (rows, *second):
        plans += [plan for plan in one.plans if plan not in plans]
    if setup.sharding is not None:
        refuse_unshardable(setup, plans)
    # Shown here, since the bars of the rows would end it.
    with status("building the models without weights ..."):
        loaded = _check_models(setup, plans, rows.prompt_plans, absent)
    length = RunLength.of(setup, rows)
    steps = length.steps, length.per_epoch
    run = PlannedRun.of(setup, plans, rows, steps, typed, loaded)
    found = setup.extensions.answers("dstrain_dry_run", Section, planned=run)
    sections = [section for _, section in found]
    return DryRun(setup, [rows, *second], length, sections, [*dict.fromkeys(absent)])


def _without_absent_weights(setup: Setup, absent: list[str]) -> Setup:
    """Return the setup without the weights that flags name and that are not here."""
    config = setup.config
    gone: dict[str, Any] = {}
    for name in options_affecting("weights"):
        value = str(getattr(config, name) or "")
        missing = [
            path
            for path in split_commas(value)
            if not Path(path).exists()
            and not parse_preset(path).of(setup.spec.components).path.exists()
        ]
        absent += [f"--{name}: {path} does not exist" for path in missing]
        if missing:
            gone[name] = None
    return replace(setup, config=replace(config, **gone))


def _check_output(setup: Setup, absent: list[str]) -> None:
    """Refuse an output folder, or one for the feature cache, that the run refuses."""
    config = setup.config
    if config.runs_both_stages:
        refuse_folder(of_stage(setup, "data_process"))
    elif setup.stage == "data_process":
        refuse_folder(setup)
    folder = config.output_path
    if folder is None or setup.stage == "data_process":
        return
    refuse_unlisted(folder)
    if config.resume not in (None, "auto") and not Path(str(config.resume)).exists():
        absent.append(f"--resume: {config.resume} does not exist")
        return
    check_start(config, folder)


def _check_models(
    setup: Setup, plans: Sequence[Plan], prompt_plans: Sequence[Plan], absent: list[str]
) -> Pipeline | TrainingModule | None:
    """Compare model files with their networks, and what is trained with these; return
    what the run loads, without memory, or None without model files.
    """
    if not setup.models:
        return None
    missing: list[MissingFiles] = []
    found = setup.find([*plans, *prompt_plans], missing)
    absent += [f"{error.where}: {error.what}" for error in missing]
    trained = {name.partition(".")[0] for name in setup.trainables.components}
    if setup.stage == "data_process" or not trained <= found.configs.keys():
        return Pipeline.from_found(
            setup.family, setup.spec, found, setup.device, setup.dtype, empty=True
        )
    return load_module(setup, plans, found, TrainingModule, empty=True)
