"""Check what stage 2 of the same command needs before stage 1 computes anything: it may
take hours, and stage 2 may come at night.
"""

from collections.abc import Iterable
from pathlib import Path

from dstrain.distributed.world import ProcessGroup
from dstrain.runs.build import load_module
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.launch.limits import refuse_unshardable
from dstrain.runs.setup import Setup
from dstrain.storage.files import check_writable
from dstrain.training.module import TrainingModule


def check_output(stage_2: Setup, processes: ProcessGroup) -> None:
    """Refuse an output folder that the run refuses, or that cannot be written; nothing is
    left there.
    """
    directory = RunDirectory(stage_2, processes)
    directory.check_available()
    if processes.is_main:
        check_writable(_nearest_folder(directory.folder))


def _nearest_folder(folder: Path) -> Path:
    """Return the folder, or the one in which it will be made."""
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
