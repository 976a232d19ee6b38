"""Check what stage 2 of the same command needs before stage 1 computes anything: it may
take hours, and stage 2 may come at night.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from dstrain.distributed.world import ProcessGroup
from dstrain.errors import SystemFault
from dstrain.runs.build import load_module
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.launch.limits import refuse_unshardable
from dstrain.runs.setup import Setup
from dstrain.training.module import TrainingModule


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


def check_training(stage_2: Setup, input_sets: Iterable[frozenset[str]]) -> None:
    """Find the files of what is trained, and compare them with its flags; no weight is
    read.

    Raises what loading them raises, and UsageError for what sharding cannot do.

    Args:
        stage_2: The setup of stage 2.
        input_sets: The sets of inputs that rows have.
    """
    sets = dict.fromkeys(input_sets)
    plans = [stage_2.plan(inputs) for inputs in sets]
    if stage_2.sharding is not None:
        refuse_unshardable(stage_2, plans)
    found = stage_2.find(plans)
    load_module(stage_2, plans, found, TrainingModule, empty=True)
