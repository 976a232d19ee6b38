"""Compute the loss of the rows that are not trained on.

Each sample has one draw of noise and timestep in each of four equal parts of the
distribution that training draws from, and these are the same every time: what changes
from one row of the table to the next is the model alone.

    logs/validation.csv, logs/validation.jsonl  a row for each step at which it was computed
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.console import get_logger, progress_bar
from dstrain.errors import about_rows
from dstrain.graph import noticing_long_prompts
from dstrain.graph.timestep_sampler import STRATA
from dstrain.randomness import SampleKey
from dstrain.runs.checkpoints.directory import VALIDATION_CSV, VALIDATION_JSONL
from dstrain.runs.checkpoints.outputs import save_is_due
from dstrain.runs.prompt_images import undisturbed
from dstrain.runs.reports.step_log import NumberTable
from dstrain.runs.training_progress import naming_rows
from dstrain.runs.training_run import TrainingRun
from dstrain.runs.watched_run import Observer, WatchedRun
from dstrain.training import Sample, oom_as_error

logger = get_logger(__name__)

COLUMNS = (
    "step",
    "validation_loss",
    *(f"validation_loss_q{number}" for number in range(1, STRATA + 1)),
)
VALIDATION = -1
"""The epoch of a validation sample's key: no sample of training has it."""
ADVICE = ("lower --max_pixels, or --num_frames, or leave validation out",)


class Validation(Observer):
    """The validation losses of a run: computed by all processes, written by the main
    one. Where all rows are trained on there are none.
    """

    everywhere = True

    def __init__(self, run: TrainingRun) -> None:
        """Compute those of a run."""
        output = run.setup.output
        self.run = run
        self.losses: dict[int, float] = {}
        """Step -> mean loss; in the main process only."""
        self.table = NumberTable(
            output / VALIDATION_CSV, output / VALIDATION_JSONL, COLUMNS
        )
        self.files = ExitStack()

    def start(self, run: WatchedRun) -> None:
        """Open the table, with the rows up to the step that the run is at, and compute
        the losses that are missing there.
        """
        if self.run.validation and run.is_main:
            self.files.enter_context(self.table.opened(run.step))
        for row in self.table.kept:
            self.losses[int(row["step"])] = row["validation_loss"]
        self._compute_if_due(run)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Compute the losses that are due; those due with a save come after it."""
        if not save_is_due(self.run):
            self._compute_if_due(run)

    def saved(self, run: WatchedRun, files: Sequence[Path]) -> None:
        """Compute the losses that are due with a save."""
        self._compute_if_due(run)

    def end(self, run: WatchedRun, how: str) -> None:
        """Close the table, and say which step had the lowest loss, if there were
        several.
        """
        self.files.close()
        finite = {
            step: loss for step, loss in self.losses.items() if math.isfinite(loss)
        }
        if how in ("finished", "stopped") and len(finite) > 1:
            best = min(finite, key=finite.__getitem__)
            last = max(finite)
            logger.info(
                f"validation loss {finite[last]:.4g} at step {last}, "
                f"lowest {finite[best]:.4g} at step {best}"
            )

    def _compute_if_due(self, watched: WatchedRun) -> None:
        """Compute the losses that are due at this step and not in the table.

        They are due at the start, every --validation_steps, else with each save, and at
        the last step. A run that is asked to stop leaves them to the resumed one.
        """
        run = self.run
        every = run.setup.config.validation_steps
        is_due = save_is_due(run) if every is None else run.step % every == 0
        if not run.validation or not (is_due or run.step == run.total_steps):
            return
        is_missing = run.processes.is_main and run.step not in self.losses
        if not run.processes.any(is_missing):
            return
        losses = held_out_losses(run, watched.is_stopping)
        if losses is None or not run.processes.is_main:
            return
        # In the order of the rows, whichever process computed which. On the CPU: GPUs of
        # Macs have no float64.
        parts = losses.cpu().double().mean(0).tolist()
        numbers = {"validation_loss": sum(parts) / STRATA}
        numbers |= dict(zip(COLUMNS[2:], parts, strict=True))
        self.losses[run.step] = numbers["validation_loss"]
        self.table.add({"step": run.step, **numbers})
        watched.report(numbers)
        logger.info(
            f"validation loss {numbers['validation_loss']:.4f} at step {run.step}"
        )


def held_out_losses(
    run: TrainingRun, is_stopping: Callable[[], bool] = lambda: False
) -> Tensor | None:
    """Return the losses of the samples that are not trained on, (samples, 4) fp32, one for each
    part of the timesteps, on every process; None if the run is to stop.

    Samples are computed one by one, and each by one process, so that the numbers depend
    neither on the batch size nor on the number of processes. Weights, modes and
    generators are afterwards what they were.
    """
    processes = run.processes
    samples = run.validation.sample_ids
    module = run.module
    losses = torch.zeros(len(samples), STRATA, device=module.pipeline.device)
    bar = progress_bar("validation", len(samples), brief=True)
    sampler = module.timestep_sampler
    with run.weights_to_use(), undisturbed(module.pipeline), bar:
        module.timestep_sampler = sampler.stratified()
        try:
            for start in range(0, len(samples), processes.size):
                if processes.any(is_stopping()):
                    return None
                own = start + processes.rank
                # Every process must run equally many forward passes, or the collectives
                # of sharded weights hang: one without a sample repeats the first.
                row, chunk = samples[own if own < len(samples) else 0].tolist()
                computed = _sample_losses(run, row, chunk)
                if own < len(samples):
                    losses[own] = computed
                bar.update(min(processes.size, len(samples) - start))
        finally:
            module.timestep_sampler = sampler
    return processes.total(losses)


def _sample_losses(run: TrainingRun, row: int, chunk: int) -> Tensor:
    """Return the losses of one sample, (4,) fp32."""
    module = run.module
    data = run.validation.data
    seed = run.setup.config.seed
    keys = [SampleKey(seed, VALIDATION, part, row, chunk) for part in range(STRATA)]
    with naming_rows(data.name_row), oom_as_error("validation", *ADVICE):
        sample = data.source.sample(row, chunk)
        if not module.stage:
            sample = _preprocessed(run, sample, keys[0])
        return torch.cat([module.losses([sample], [key]) for key in keys])


def _preprocessed(run: TrainingRun, sample: Sample, key: SampleKey) -> Sample:
    """Return the sample with its cached values, computed once for all its losses."""
    module = run.module
    notice: Any = partial(module.on_long_prompt, key)
    with about_rows([key.row]), noticing_long_prompts(notice):
        values = module.preprocess(sample, module.plan(sample.inputs))
    return replace(sample, values=values, is_preprocessed=True)
