"""Run a configuration, in the same way from the command line, a launcher or a notebook."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from dstrain.config import validate
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import changed
from dstrain.config.serialize import refill_advice
from dstrain.console import fitted, get_logger, is_main_process, redacted
from dstrain.distributed import ProcessGroup, distributed_run
from dstrain.errors import (
    CacheError,
    DstrainError,
    MissingFiles,
    OutOfMemory,
    SystemFault,
    UsageError,
)
from dstrain.graph import Plan, Task, as_text
from dstrain.models import write_toy
from dstrain.pipeline.model_choice import naming_keywords, with_family
from dstrain.registry import disabling
from dstrain.runs.checks.flags import refuse_unshardable
from dstrain.runs.checks.rows import dataset_inputs
from dstrain.runs.dry_run.planned_run import described_with_bytes
from dstrain.runs.dry_run.summary import plan_run
from dstrain.runs.launch.accelerator import meet, without_accelerates_own
from dstrain.runs.launch.launchers import check_launch, in_stage, read_launch
from dstrain.runs.launch.variables import Launch, machine_size, world_size
from dstrain.runs.resolve import of_stage, resolve
from dstrain.runs.script.parts import NO_PARTS, Callback, OwnParts, RunResult
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.before_stage_2 import check_output
from dstrain.runs.stage_1.precompute import data_process
from dstrain.runs.start_training import train
from dstrain.training import TrainingModule, oom_as_error

logger = get_logger(__name__)


@contextmanager
def toy_models(setup: Setup) -> Iterator[Setup]:
    """Yield the setup, with the files of a toy model if --toy asks for one.

    Its weights depend on nothing else.
    """
    if not setup.config.toy:
        yield setup
        return
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        toy = write_toy(setup.family, setup.spec.variant, Path(folder))
        yield replace(setup, models=(*toy, *setup.models))


def plan_of(config: TrainConfig) -> tuple[Plan, Mapping[str, str]]:
    """Plan a command line: for the columns of its metadata, or else for every column.

    Returns also how the weights of its components are kept, in words.
    """
    with disabling(config.disabled_plugins):
        setup = resolve(config)
        plan = setup.plan(dataset_inputs(setup))
        if not setup.keepers:
            return plan, {}
        with toy_models(setup) as ready:
            return plan, described_with_bytes(ready, plan)


def run(
    config: TrainConfig,
    module_class: type[TrainingModule] = TrainingModule,
    *,
    tasks: Sequence[Task] = (),
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a task or one stage of it; return what it left.

    A task with a feature cache is run in two stages, one after the other.

    Raises a DstrainError, whose exit code says what kind of thing went wrong and whose
    notes say how a script writes the flags in it, or the OSError of files that cannot be
    removed.

    Args:
        config: The options.
        module_class: A TrainingModule of your own.
        tasks: Tasks of your own, of which the configuration names one.
        callbacks: Called with the numbers of each optimizer step, in the main process.
            What one raises ends the run; where one returns True, the run saves and ends.
    """
    if not isinstance(config, TrainConfig):
        what = f"expected a TrainConfig, got {type(config).__name__}"
        raise UsageError("run()", what, "write run(TrainConfig(...))")
    own = OwnParts(module_class, tasks, callbacks)
    own.check()
    with naming_keywords(TrainConfig):
        config = with_family(config)
        for flag in changed(config, "origin"):
            raise UsageError(f"--{flag.name}", "would set nothing: give what it says")
        validate(config)
        return start(config, own)


def start(config: TrainConfig, own: OwnParts = NO_PARTS) -> RunResult:
    """Run a configuration that is valid; see `run`."""
    launch = read_launch(os.environ)
    check_launch(config, launch, world_size(os.environ))
    in_stage_1 = config.stage == "data_process"
    kept = values_are_kept() if in_stage_1 else nullcontext()
    try:
        with without_accelerates_own(), kept, disabling(config.disabled_plugins):
            return _start(config, own, launch)
    except CacheError as error:
        error.help_lines += (refill_advice(config),)
        raise


@contextmanager
def values_are_kept() -> Iterator[None]:
    """Say of a fault of the system in stage 1 that what was computed is not lost."""
    try:
        yield
    except (SystemFault, OutOfMemory) as error:
        advice = "once that is mended, run the same command again"
        error.help_lines += (f"computed values are kept: {advice}",)
        raise


def _start(config: TrainConfig, own: OwnParts, launch: Launch) -> RunResult:
    setup = resolve(config, own)
    launch = in_stage(launch, setup.stage, world_size(os.environ))
    setup = replace(setup, sharding=launch.sharding)
    if setup.sharding is not None:
        setup.sharding.processes(world_size(os.environ), machine_size(os.environ))
        refuse_unshardable(setup)
    if config.dry_run:
        dry_run(setup)
        return RunResult(config.output_path or config.feature_cache or Path())
    # Of several experts in training, one step of a process may need only one.
    unused = config.find_unused_parameters or len(setup.trained_experts) > 1
    steps = config.gradient_accumulation_steps
    accelerator = meet(os.environ, launch.sharding, unused, steps)
    if launch.said and accelerator.is_main_process:
        logger.info(launch.said)
    setup = replace(setup, device=accelerator.device)
    with distributed_run(accelerator) as processes, toy_models(setup) as ready:
        if config.runs_both_stages:
            return run_both_stages(ready, processes, own)
        if ready.stage != "data_process":
            return train(ready, processes, own)
        with oom_as_error("stage 1"):
            data_process(ready, processes)
        return RunResult(ready.cache_path)


def dry_run(setup: Setup) -> None:
    """Print what a run would do; with --json also where it then refuses faulty rows."""
    config = setup.config
    with toy_models(setup) as ready:
        try:
            found = plan_run(ready)
        except UsageError as error:
            if config.json and error.faults and is_main_process():
                skipping = replace(config, on_bad_sample="skip")
                lines = [
                    redacted(json.dumps({"row": row, "fault": why}, ensure_ascii=False))
                    for row, why in error.faults
                ]
                # Where rows are left, these are listed as if the others were skipped.
                with suppress(DstrainError):
                    lines = [*plan_run(replace(ready, config=skipping)).as_json()]
                print(*lines, sep="\n")
            raise
    if not is_main_process():
        return
    if config.json:
        print(*found.as_json(), sep="\n")
        return
    plan = setup.plan(dataset_inputs(setup))
    kept = setup.keepers.described(plan.components[""])
    is_split = config.stage != "" or config.runs_both_stages
    page = as_text(plan, kept, is_split).splitlines()
    print("\n".join([*fitted(page), found.page()]), end="")


def run_both_stages(
    setup: Setup, processes: ProcessGroup, own: OwnParts = NO_PARTS
) -> RunResult:
    """Fill the feature cache, free what that loaded, and train from it: as the commands
    of the two stages do one after the other.
    """
    stage_2 = of_stage(setup, "train")
    check_output(stage_2, processes)
    with values_are_kept(), oom_as_error("stage 1"):
        try:
            # Held by nobody, so that the rows it has read are gone when it returns.
            data_process(of_stage(setup, "data_process"), processes, stage_2)
        except MissingFiles as error:
            advice = (
                f"or train from the cache as it is, with --task {stage_2.config.task}"
            )
            error.help_lines += (advice,)
            raise
    return train(stage_2, processes, own)
