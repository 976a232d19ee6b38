"""Check what stage 2 of the same command needs before stage 1 computes anything: it may
take hours, and stage 2 may come at night.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dstrain.distributed import ProcessGroup
from dstrain.errors import SystemFault
from dstrain.runs.build import choose_validation, order_of, total_steps
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.other_run import refuse_other_run
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.checkpoints.run_identity import rows_fingerprint
from dstrain.runs.checkpoints.saved_states import saved_facts
from dstrain.runs.checks.flags import refuse_unshardable
from dstrain.runs.loaded_module import load_module
from dstrain.runs.setup import Setup
from dstrain.runs.training_data import open_training_data
from dstrain.runs.training_run import PlannedTraining
from dstrain.training import TrainingModule


def check_output(stage_2: Setup, processes: ProcessGroup) -> None:
    """Refuse an output folder that the run refuses; raises SystemFault for one that cannot
    be written.
    """
    directory = RunDirectory(stage_2, processes)
    directory.check_available()
    place = _nearest(directory.folder)
    # Asked, not tried: a process that is killed here leaves nothing in it.
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        what = f"cannot be written: {place} is no folder that can"
        raise SystemFault(directory.folder, what)


def _nearest(folder: Path) -> Path:
    """Return the folder, or what is there of the path to it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_training(
    stage_2: Setup, input_sets: Iterable[frozenset[str]]
) -> TrainingModule:
    """Find the files of what is trained, and compare them with its flags; no weight is
    read. Returns the module, without weights.

    Raises what loading them raises, and UsageError for what sharding cannot do.
    """
    plans = [stage_2.plan(inputs) for inputs in dict.fromkeys(input_sets)]
    if stage_2.sharding is not None:
        refuse_unshardable(stage_2, plans)
    found = stage_2.find(plans)
    return load_module(stage_2, plans, found, TrainingModule, empty=True)


def check_resume(
    stage_1: Setup, stage_2: Setup, processes: ProcessGroup, module: TrainingModule
) -> None:
    """Compare the state to resume from with the flags and the rows of this run.

    Raises StateError for another run, or another dataset. Files that changed under the
    same names are found later, when their digests are known.
    """
    config = stage_2.config
    if config.resume is None:
        return
    kept = states(stage_2.output) if config.resume == "auto" else [Path(config.resume)]
    saved = saved_facts(kept[0]) if kept else {}
    if not saved:
        return
    data = open_training_data(stage_1)
    groups, _ = choose_validation(stage_1, data)
    order = order_of(stage_2, data, groups, processes.size)
    plans = [stage_2.plan(inputs) for inputs in data.input_sets]
    found = stage_2.find(plans)
    encoders = stage_1.find(plans, [])
    run = PlannedTraining(
        setup=stage_2,
        processes=processes,
        module=module,
        order=order,
        data=data,
        found=replace(found, configs={**encoders.configs, **found.configs}),
        total_steps=total_steps(config, order.steps_per_epoch),
    )
    content = rows_fingerprint(stage_1)
    refuse_other_run(run, saved["config_digest"], saved["content"], content)
