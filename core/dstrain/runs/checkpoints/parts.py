"""What the other processes do while the main process saves a run that is sharded among
them.
"""

from collections.abc import Mapping

from dstrain.lora import format_named, lora_state
from dstrain.models import components_of
from dstrain.models.formats import CheckpointFormat
from dstrain.runs.checkpoints.resume import training_state
from dstrain.runs.checkpoints.state import published, take_part_in_saving
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import take_part
from dstrain.training import in_eval_mode


def take_part_in_save(run: TrainingRun, data_digests: Mapping[str, str]) -> None:
    """Give this process's rows to the main process, in the order in which that writes
    weights, averages and the state.
    """
    saved = [in_eval_mode(run.optimizer)]
    if run.ema:
        saved.append(run.ema.applied())
    for weights in saved:
        with weights:
            for component in run.module.trained.components:
                _take_part_in(run, component)
    take_part_in_saving(training_state(run, data_digests))


def _take_part_in(run: TrainingRun, component: str) -> None:
    network = run.module.pipeline.components[component]
    if component in run.module.trained.lora:
        lora_state(network)
    else:
        take_part(published(network, key_format(run, component)))


def key_format(run: TrainingRun, component: str) -> CheckpointFormat:
    """Return the format of the keys of a component's weights files."""
    setup = run.setup
    known = components_of(setup.family)[component]
    config = run.found.configs[component]
    program = setup.saved_names(component)
    found = format_named(program).weights(known, setup.family, config)
    assert found is not None  # `check_saved_names` has refused the others
    return found
