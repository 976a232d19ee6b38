"""The training loop."""

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dstrain.cache.in_use import reading
from dstrain.config import command_line
from dstrain.config.serialize import NEW_START
from dstrain.console import get_logger, number_of, progress_bar
from dstrain.distributed import ProcessGroup, catch_stop_signals, peer_failed
from dstrain.errors import Diverged, OutOfMemory, StateError, UsageError, first_few
from dstrain.graph import LongPrompt
from dstrain.randomness import SampleKey, seed_global
from dstrain.runs.build import open_training_data, prepare
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.checkpoints.state import damage
from dstrain.runs.checkpoints.state_folders import states
from dstrain.runs.checks.rows import log_warnings
from dstrain.runs.long_prompts import LongPromptLog
from dstrain.runs.offload import swap_advice
from dstrain.runs.reports.metrics import MetricsLogger
from dstrain.runs.reports.previews import Previews, open_previews
from dstrain.runs.reports.summary import RunStatistics, log_end, log_start
from dstrain.runs.script.parts import NO_PARTS, OwnParts, RunResult, StepNumbers
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import read_samples
from dstrain.runs.training_run import TrainingRun
from dstrain.runs.validation_loss import VALIDATION, Validation
from dstrain.storage import RunFiles
from dstrain.storage.files import unused_name
from dstrain.training import (
    MicroBatch,
    StoppedWaiting,
    is_out_of_memory,
    load_batches,
    oom_as_error,
    peak_memory,
    split_across_ranks,
)
from dstrain.training.loader import Batch
from dstrain.training.memory import LOAD_ADVICE
from dstrain.training.optimizers import clip_gradients

logger = get_logger(__name__)


def train(
    setup: Setup,
    processes: ProcessGroup,
    own: OwnParts = NO_PARTS,
) -> RunResult:
    """Train and save; every number that is logged is the mean over a whole optimizer
    step and all processes.
    """
    directory = RunDirectory(setup, processes)
    directory.check_available()
    if setup.stage != "train":
        read_samples(setup, processes)
    log_warnings(setup)
    reads_cache = setup.stage == "train"
    with (
        directory.opened(),
        reading(setup.cache_path) if reads_cache else nullcontext(),
    ):
        samples = open_training_data(setup)
        previews = open_previews(setup, samples)
        with oom_as_error("loading", *LOAD_ADVICE, *_in_two_stages(setup)):
            run = prepare(setup, processes, samples, own.module_class)
            previews.load(run)
        directory.load_state(run)
        log_start(run)
        logs = _note_long_prompts(run)
        directory.start(run)
        losses = run_steps(run, directory, previews, own)
        for log in logs:
            log.conclude()
        if not losses:
            directory.save_if_missing(run)
        log_end(run, directory.weights, len(losses))
        weights = RunFiles.read(directory.folder).newest_weights()
        return RunResult(directory.folder, tuple(weights), losses, run.step)


def _note_long_prompts(run: TrainingRun) -> list[LongPromptLog]:
    """Note the long prompts of a run; return the logs, one for each dataset."""
    mode = run.setup.config.on_long_prompt
    datasets = {id(one): one for one in (run.data, run.validation.data)}
    logs = [
        LongPromptLog(mode, data.name_row, warns_at_once=True)
        for data in datasets.values()
    ]

    def note(key: SampleKey, found: LongPrompt) -> None:
        log = logs[-1] if key.epoch == VALIDATION else logs[0]
        log.note(key.row, found)

    run.module.on_long_prompt = note
    return logs


def _in_two_stages(setup: Setup) -> list[str]:
    """Return what to do with less memory about a run that is not split."""
    if setup.stage:
        return []
    command = command_line(setup.config, feature_cache=Path("cache"))
    return [f"or train in two stages, the second without the encoders; run: {command}"]


def run_steps(
    run: TrainingRun,
    directory: RunDirectory,
    previews: Previews,
    own: OwnParts = NO_PARTS,
) -> tuple[float, ...]:
    """Run optimizer steps from where the run is to its last, with logs, saves and
    previews, or until a callback ends it; return their losses.
    """
    losses = array("d")
    statistics = RunStatistics()
    bar = progress_bar("train", run.total_steps, run.step)
    extensions = run.setup.extensions
    is_main = run.processes.is_main
    log = MetricsLogger(directory.folder, extensions, run.trackers, is_main)
    validation = Validation(run)
    tracked = run.trackers.opened(directory.folder, run.step)
    with (
        log.opened(run.step),
        validation.opened(),
        tracked,
        bar as progress,
        catch_stop_signals() as is_stopping,
    ):
        validation.compute_if_due(is_stopping)
        previews.make_if_due(run, saved=True, is_stopping=is_stopping)
        saved = True
        waiting = steps(run, is_stopping)
        while (numbers := _next_step(run, waiting, directory, saved)) is not None:
            log.add(numbers)
            statistics.add(numbers)
            losses.append(numbers["loss"])
            # Short, so that a terminal of 80 columns has room for the bar.
            loss = statistics.mean_loss
            over = number_of(len(statistics.losses), "step")
            mean = f"loss {loss:.4f} ({over})"
            rate = f"lr {numbers['learning_rate']:.2g}"
            progress.set_postfix_str(f"{mean} {rate}", refresh=False)
            progress.update()
            is_enough = is_main and own.call(StepNumbers.of(numbers, run.total_steps))
            saved = directory.save_if_due(run, int(numbers["epoch"]))
            validation.compute_if_due(is_stopping)
            previews.make_if_due(run, saved, is_stopping)
            if run.processes.any(is_stopping()) and run.step < run.total_steps:
                directory.stop(run, saved)
            # In every process alike, or one would wait for the others.
            if own.callbacks and run.processes.any(is_enough):
                if not saved:
                    directory.save(run, f"step-{run.step}")
                break
    if statistics.steps:
        for line in statistics.summary(peak_memory()):
            logger.info(line)
        validation.conclude()
    return tuple(losses)


def _next_step(
    run: TrainingRun,
    waiting: Iterator[dict[str, float]],
    directory: RunDirectory,
    saved: bool,
) -> dict[str, float] | None:
    """Make a step, None after the last; a signal while its data is waited for ends the
    run, saved where it is.

    Of several processes, others may be in the step already, so that none can save.
    """
    try:
        return next(waiting, None)
    except StoppedWaiting:
        if run.step == 0 or run.processes.size > 1:
            raise KeyboardInterrupt from None
        directory.stop(run, saved)


def steps(
    run: TrainingRun, is_stopping: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, float]]:
    """Make the run's optimizer steps one by one; yields the numbers of each, as they
    are logged.
    """
    waiting = time.perf_counter()
    for epoch, batches in optimizer_steps(run, is_stopping):
        start = time.perf_counter()
        learning_rate = run.learning_rate
        try:
            with run.processes.together():
                loss, norm = update(run, batches)
                with torch.no_grad():
                    run.setup.extensions.modify_step(
                        run.step + 1, run.module, run.optimizer
                    )
                # The average is of what the step left, changes by plugins included.
                run.ema.update()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(run, batches) from error
        except UsageError as error:
            if not error.rows:
                raise
            raise error.at(run.data.name_row(row) for row in error.rows) from error
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
        }
        waiting = time.perf_counter()


def out_of_memory(run: TrainingRun, batches: Sequence[Batch]) -> OutOfMemory:
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
    row = run.data.name_row(batch.micro_batch.keys[0].row)
    return OutOfMemory(
        f"step {run.step + 1}",
        f"out of memory at {peak_memory():.1f} GiB with {number_of(len(batch.samples), 'sample')} like {row}",
        f"values: {', '.join(shapes or values)}",
        "lower --batch_size (and raise --gradient_accumulation_steps), --max_pixels or --lora_rank",
        "or give --use_gradient_checkpointing, --use_gradient_checkpointing_offload",
        *swap_advice(run.setup),
    )


def update(run: TrainingRun, batches: Sequence[Batch]) -> tuple[float, float]:
    """Make one optimizer step over a global batch.

    Returns its mean loss and the norm of its gradient before clipping.
    """
    losses = []
    for batch in batches:
        ends_step = batch.micro_batch.ends_step
        with nullcontext() if ends_step else run.adding_up():
            loss = run.model(batch)
            run.module.refuse_without_gradient(loss)
            # DDP averages gradients over processes, and each loss is already a share of
            # the global mean.
            loss.backward(torch.full_like(loss, run.processes.size))
        run.module.block_swap.release()
        losses.append(loss.detach())
    if run.step == 0:
        warn_without_gradient(run)
    limit = run.setup.config.max_grad_norm or math.inf
    parameters = run.module.trained_parameters
    norm = clip_gradients(parameters, limit)
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    total = run.processes.total(loss)
    loss_value, norm_value = torch.stack([total, norm]).tolist()
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        refuse_damaged_weights(run)
        raise diverged(run, batches, loss_value, norm_value)
    # Some draw: on every process the same, and after a resumption as before.
    seed_global((run.setup.config.seed, run.step), "optimizer")
    run.optimizer.step()
    run.lr_scheduler.step()
    # As `zero_grad` does, without its records for a profiler.
    for parameter in parameters:
        parameter.grad = None
    return loss_value, norm_value


def refuse_damaged_weights(run: TrainingRun) -> None:
    """Raise StateError for weights that are not finite: no step makes such, so that they
    are from the files.
    """
    pipeline = run.module.pipeline
    with run.module.block_swap.readable():
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
    samples.
    """
    keys = [key for batch in batches for key in batch.micro_batch.keys]
    named = ", ".join(dict.fromkeys(run.data.name_row(key.row) for key in keys))
    others = run.processes.size - 1
    more = f" and those of {others} other processes" if others else ""
    whole = (state for state in states(run.setup.output) if not damage(state))
    weights = RunFiles.read(run.setup.output).newest_weights()
    config = run.setup.typed
    lower = run.setup.optimizer.rates.times(0.1).plain
    changes: dict[str, Any] = {**NEW_START, "learning_rate": lower}
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


def warn_without_gradient(run: TrainingRun) -> None:
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


def optimizer_steps(
    run: TrainingRun, is_stopping: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, list[Batch]]]:
    """Yield (epoch, micro-batches of one optimizer step) from where the run is to
    its last step.
    """
    per_epoch = run.order.steps_per_epoch
    while run.step < run.total_steps:
        epoch, done = divmod(run.step, per_epoch)
        workers = run.setup.config.dataset_num_workers
        batches: list[Batch] = []
        order = micro_batches(run, epoch, done)
        for batch in load_batches(run.source, order, workers, is_stopping):
            batches.append(batch)
            if batch.micro_batch.ends_step:
                yield epoch, batches
                batches = []


def micro_batches(
    run: TrainingRun,
    epoch: int,
    done: int,
) -> Iterable[MicroBatch]:
    """Yield this process's micro-batches of an epoch, without the steps already done or
    beyond the last.
    """
    left = run.total_steps - run.step
    rank = run.processes.rank
    size = run.processes.size
    batches = run.order.global_batches(epoch, done, run.position, run.pass_position)
    for samples in islice(batches, left):
        yield from split_across_ranks(
            samples, run.setup.config.batch_size, rank, size, run.data.loss_weight
        )
