"""Say what to do about a step whose loss or gradient is not finite."""

from collections.abc import Sequence
from typing import Any

from dstrain.config import command_line
from dstrain.config.serialize import new_start
from dstrain.distributed import peer_failed
from dstrain.errors import Diverged, StateError
from dstrain.runs.checkpoints.state import damage
from dstrain.runs.checkpoints.state_folders import states
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import RunFiles
from dstrain.storage.files import unused_name
from dstrain.training.loader import Batch


def refuse_damaged_weights(run: TrainingRun) -> None:
    """Raise StateError for weights that are not finite: no step makes such, so that they
    are from the files.
    """
    pipeline = run.module.pipeline
    found = pipeline.damaged(pipeline.components)
    if run.is_sharded and run.processes.any(bool(found)) and not found:
        # Each looks at its own rows.
        raise peer_failed("another process has weights that are not finite")
    if found:
        what = f"its loss is not finite: {found[0]}"
        raise StateError(f"step {run.step + 1}", what, *found[1:], "download it again")


def diverged(
    run: TrainingRun,
    batches: Sequence[Batch],
    loss: float,
    norm: float,
) -> Diverged:
    """Return the error of a step whose loss or gradient is not finite, naming its
    samples; raises StateError for weights that are not finite themselves.
    """
    refuse_damaged_weights(run)
    keys = [key for batch in batches for key in batch.micro_batch.keys]
    named = ", ".join(dict.fromkeys(run.data.name_row(key.row) for key in keys))
    others = run.processes.size - 1
    more = f" and those of {others} other processes" if others else ""
    whole = (state for state in states(run.setup.output) if not damage(state))
    weights = RunFiles.read(run.setup.output).newest_weights()
    config = run.setup.typed
    lower = run.setup.optimizer.rates.times(0.1).plain
    changes: dict[str, Any] = {**new_start(), "learning_rate": lower}
    if weights or config.resume_from_checkpoint:
        # Another folder, since --overwrite excludes --resume_from_checkpoint.
        changes["output_path"] = unused_name(run.setup.output)
        start = ",".join(map(str, weights)) or config.resume_from_checkpoint
        changes["resume_from_checkpoint"] = start
    else:
        changes["overwrite"] = True
    return Diverged(
        f"step {run.step + 1}",
        f"loss {loss}, gradient norm {norm}; the weights are unchanged",
        f"last good checkpoint: {next(whole, 'none')}",
        f"check the samples of this step: {named}{more}",
        "or start again with a lower --learning_rate or --max_grad_norm; for example, run: "
        + command_line(config, **changes),
    )
