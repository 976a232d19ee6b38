"""The training loop: next step, observers, save if due."""

import math
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from dstrain.console import get_logger, number_of
from dstrain.distributed import catch_stop_signals
from dstrain.errors import OutOfMemory, first_few
from dstrain.installed import NamingPlugin
from dstrain.randomness import seed_global
from dstrain.runs.observers import Observers
from dstrain.runs.training_progress import Training, naming_rows
from dstrain.runs.watched_run import INTERRUPT, SAVE, STOP
from dstrain.training import LESS_MEMORY, is_out_of_memory, peak_memory
from dstrain.training.loader import Batch

logger = get_logger(__name__)


class Saver:
    """Saves a run when that is due. This one saves nothing."""

    weights: Sequence[Path] = ()
    """The files of weights saved last, in the main process."""

    def save_if_due(self, run: Any, epoch: int) -> bool:
        """Save if that is due after a step of this epoch; return whether it was."""
        return False

    def save(self, run: Any, name: str) -> None:
        """Save, and name the files of weights so."""

    def stop(self, run: Any) -> NoReturn:
        """Raise what says how to go on, of a run that was saved."""
        raise KeyboardInterrupt


def run_steps(run: Training, saver: Saver, observers: Observers) -> tuple[float, ...]:
    """Run optimizer steps from where the run is to its last, or until an observer or a
    signal ends it: next step, observers, save if due. Return their losses.
    """
    losses = array("d")
    run.keep = observers.kept
    with catch_stop_signals() as is_stopping, observers.watching(is_stopping):
        for numbers in steps(run):
            losses.append(numbers["loss"])
            observers.step(numbers)
            saved = saver.save_if_due(run, int(numbers["epoch"]))
            if saved:
                observers.saved(saver.weights)
            # In every process alike, or one would wait for the others.
            asked = observers.agree()
            is_interrupted = INTERRUPT in asked and run.step < run.total_steps
            if not saved and (is_interrupted or asked & {SAVE, STOP}):
                saver.save(run, f"step-{run.step}")
                observers.saved(saver.weights)
                saved = True
            if is_interrupted:
                saver.stop(run)
            if STOP in asked:
                break
    return tuple(losses)


def steps(run: Training) -> Iterator[dict[str, float]]:
    """Make the run's optimizer steps one by one; yields the numbers of each, as they
    are logged.
    """
    waiting = time.perf_counter()
    for epoch, batches in run.steps_of_batches():
        start = time.perf_counter()
        learning_rate = run.learning_rate
        try:
            with naming_rows(run.name_row):
                loss, norm = update(run, batches)
                run.after_update()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(run, batches) from error
        run.step += 1
        end = time.perf_counter()
        yield {
            "step": run.step,
            "epoch": epoch,
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": norm,
            "samples_per_second": batches[0].micro_batch.global_batch_size
            / (end - waiting),
            "data_wait_seconds": start - waiting,
            "memory_gib": peak_memory(),
        }
        waiting = time.perf_counter()


def out_of_memory(run: Training, batches: Sequence[Batch]) -> OutOfMemory:
    """Return the error of a step that did not fit, with a row of it, its shapes, the
    peak and advice.
    """
    # The first micro-batch is the largest.
    batch = batches[0]
    values = batch.samples[0].values
    shapes = [
        f"{name} {list(value.shape)}"
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    row = run.name_row(batch.micro_batch.keys[0].row)
    return OutOfMemory(
        f"step {run.step + 1}",
        f"out of memory at {peak_memory():.1f} GiB with {number_of(len(batch.samples), 'sample')} like {row}",
        f"values: {', '.join(shapes or values)}",
        *LESS_MEMORY,
    )


def update(run: Training, batches: Sequence[Batch]) -> tuple[float, float]:
    """Make one optimizer step over a global batch.

    Returns its mean loss and the norm of its gradient before clipping.
    """
    naming = NamingPlugin(run.updater.plugin, "its updater")
    losses = []
    for batch in batches:
        ends_step = batch.micro_batch.ends_step
        with nullcontext() if ends_step else run.adding_up():
            loss = run.model(batch)
            run.module.refuse_without_gradient(loss)
            with naming:
                run.updater.backward(loss, ends_step)
        run.module.pipeline.keepers.step_done()
        losses.append(loss.detach())
    if run.step == 0:
        warn_without_gradient(run)
    with naming:
        norm = run.updater.clip()
        if not isinstance(norm, torch.Tensor):
            raise TypeError(f"clip returned {type(norm).__name__}, not Tensor")
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    total = run.processes.total(loss)
    # Read together, since each reading waits for the device.
    loss_value, norm_value = torch.stack([total, norm]).tolist()
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise run.diverged(run, batches, loss_value, norm_value)
    # Some draw: on every process the same, and after a resumption as before.
    seed_global((run.seed, run.step), "optimizer")
    with naming:
        run.updater.step()
    if run.lr_scheduler is not None:
        run.lr_scheduler.step()
    # As `zero_grad` does, without its records for a profiler.
    for parameter in run.module.trained_parameters:
        parameter.grad = None
    return loss_value, norm_value


def warn_without_gradient(run: Training) -> None:
    """Name the trained parameters that the first loss did not reach."""
    names = [
        name
        for name, parameter in run.module.trained.parameters.items()
        if parameter.grad is None
    ]
    if names:
        logger.warning(
            f"no gradient reaches {number_of(len(names), 'parameter')}: {first_few(names)}"
        )
