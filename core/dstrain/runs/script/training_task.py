"""Train with an Accelerator, a dataset and a logger of a script's own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dstrain.console import bars_hidden
from dstrain.distributed import ProcessGroup
from dstrain.errors import UsageError, about_rows, nearest
from dstrain.graph import Column
from dstrain.pipeline.arguments import with_sizes
from dstrain.randomness import SampleKey, digest
from dstrain.runs.loop import Saver, run_steps
from dstrain.runs.observers import Observers
from dstrain.runs.reports.progress import Bar, RunStatistics
from dstrain.runs.script.parts import StepNumbers
from dstrain.runs.script.weights_logger import TrainingLogger
from dstrain.runs.training_progress import Training, naming_rows
from dstrain.runs.watched_run import Observer, WatchedRun
from dstrain.training import MicroBatch, Sample, TrainingModule
from dstrain.training.loader import Batch
from dstrain.training.module import keep_frozen_apart
from dstrain.training.updater import Updater

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


class Rows(Protocol):
    """A dataset: rows by number, each a mapping from inputs, or their columns, to values."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row; it is asked for again in each epoch."""


def launch_training_task(
    accelerator: Accelerator,
    dataset: Rows,
    module: TrainingModule,
    logger: TrainingLogger,
    *,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    num_epochs: int = 1,
    max_grad_norm: float | None = 1.0,
    optimizer: Optimizer | None = None,
    lr_scheduler: LRScheduler | None = None,
    seed: int = 0,
) -> tuple[float, ...]:
    """Train a module on a dataset, sample by sample; return the loss of each optimizer step.

    A step is the mean over one sample per process, times the accumulation steps of the
    Accelerator; the last one of an epoch may be smaller. The order, noise and timesteps
    follow from the seed.

    Raises UsageError for what cannot be trained so, and Diverged for a loss that is not
    finite.

    Args:
        accelerator: Its processes share the samples; its mixed precision must be 'no', since
            the pipeline computes in its own dtype.
        dataset: The rows.
        module: What is trained, in training mode.
        logger: Called after steps and epochs in the main process, such as a WeightsLogger.
        learning_rate: That of AdamW; by default 1e-4.
        weight_decay: That of AdamW; by default 0.01.
        num_epochs: How often each row is used.
        max_grad_norm: The norm to which gradients are clipped; None for no limit.
        optimizer: In place of AdamW, of `module.trained_parameters`.
        lr_scheduler: The schedule of that optimizer.
        seed: The seed of order, noise and timesteps.
    """
    _check(accelerator, module)
    if num_epochs < 1:
        raise UsageError("num_epochs", f"expected 1 or more, got {num_epochs}")
    parameters = module.trained_parameters
    if optimizer is None:
        if lr_scheduler is not None:
            raise UsageError("lr_scheduler", "is of an optimizer; give that, too")
        optimizer = torch.optim.AdamW(
            parameters,
            lr=LEARNING_RATE if learning_rate is None else learning_rate,
            weight_decay=WEIGHT_DECAY if weight_decay is None else weight_decay,
        )
    elif learning_rate is not None or weight_decay is not None:
        what = "has a learning rate and a weight decay of its own; give no others"
        raise UsageError("optimizer", what)
    # Networks are registered before the wrapper looks for them.
    first = sample_of(module, dataset, 0)
    with naming_rows("row {}".format), about_rows([0]):
        module.plan(first.inputs)
    keep_frozen_apart(module)
    processes = ProcessGroup(accelerator)
    updater = Updater()
    updater.start(parameters, optimizer, max_grad_norm, processes.size)
    run = ScriptRun(
        processes=processes,
        module=module,
        model=accelerator.prepare(module),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        updater=updater,
        total_steps=0,
        seed=seed,
        dataset=dataset,
    )
    run.total_steps = num_epochs * run.steps_per_epoch
    watched = WatchedRun(
        folder=None,
        config=None,
        total_steps=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        is_main=processes.is_main,
        module=module,
        wait=processes.wait,
    )
    own = [Bar(RunStatistics()), _CallsLogger(logger)]
    return run_steps(run, Saver(), Observers(watched, processes, own))


def _check(accelerator: Accelerator, module: TrainingModule) -> None:
    """Refuse what cannot be trained in this loop."""
    if not module.trained_parameters:
        what = "trains nothing yet"
        raise UsageError("module", what, "call its switch_to_training_mode first")
    if accelerator.mixed_precision != "no":
        what = f"has mixed_precision={accelerator.mixed_precision!r}"
        advice = "make it with 'no'; the pipeline computes in its own torch_dtype"
        raise UsageError("accelerator", what, advice)
    if accelerator.distributed_type in SHARDED:
        what = f"is one of {accelerator.distributed_type.value}, which this loop does not use"
        raise UsageError("accelerator", what)


class _CallsLogger(Observer):
    """Calls the logger of a script in the main process, while the others wait."""

    everywhere = True

    def __init__(self, logger: TrainingLogger) -> None:
        self.logger = logger

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        ends_epoch = run.step % run.steps_per_epoch == 0
        if run.is_main:
            with bars_hidden():
                of_step = StepNumbers.of(numbers, run.total_steps)
                self.logger.on_step_end(run.module, of_step)
                if ends_epoch:
                    self.logger.on_epoch_end(run.module, of_step.epoch)
        if ends_epoch:
            run.wait()

    def end(self, run: WatchedRun, how: str) -> None:
        if how == "finished":
            if run.is_main:
                self.logger.on_training_end(run.module, run.step)
            run.wait()


@dataclass(kw_only=True)
class ScriptRun(Training):
    """A training of rows of a script's own."""

    dataset: Rows

    @property
    def per_step(self) -> int:
        """Return the number of samples of a step."""
        accumulated = int(self.processes.accelerator.gradient_accumulation_steps)
        return self.processes.size * accumulated

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps of an epoch, the last of which may be smaller."""
        return math.ceil(len(self.dataset) / self.per_step)

    def steps_of_batches(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (epoch, micro-batches of one step, each of one sample)."""
        for epoch in range(self.total_steps // self.steps_per_epoch):
            for rows in self._rows_of_steps(epoch):
                yield epoch, [*self._batches(rows, epoch)]

    def _rows_of_steps(self, epoch: int) -> Iterator[list[int]]:
        """Yield the rows of each step of an epoch, in an order that the seed decides."""
        number = int.from_bytes(digest((self.seed, epoch), "order")[:7], "little")
        shuffled = torch.randperm(
            len(self.dataset), generator=torch.Generator().manual_seed(number)
        )
        order: list[int] = shuffled.tolist()
        for start in range(0, len(order), self.per_step):
            yield order[start : start + self.per_step]

    def _batches(self, rows: Sequence[int], epoch: int) -> Iterator[Batch]:
        """Yield this process's samples of a step."""
        rounds = math.ceil(len(rows) / self.processes.size)
        for number in range(rounds):
            position = number * self.processes.size + self.processes.rank
            # Every process takes part in each round; where rows end, with weight 0.
            weight = float(position < len(rows))
            row = rows[position] if weight else rows[0]
            key = SampleKey(self.seed, epoch, 0, row)
            micro_batch = MicroBatch([key], [weight], len(rows), number == rounds - 1)
            sample = sample_of(self.module, self.dataset, row)
            with naming_rows(self.name_row), about_rows([row]):
                self.module.plan(sample.inputs)
            yield Batch(micro_batch, [sample])


def sample_of(module: TrainingModule, dataset: Rows, row: int) -> Sample:
    """Return a row as a sample: by the names of inputs, with the sizes of its images.

    Raises UsageError naming the row and what is no input of the variant.
    """
    inputs = module.pipeline.spec.with_task_inputs(module.task).inputs
    columns = {
        source.name: name
        for name, source in inputs.items()
        if isinstance(source, Column)
    }
    values: dict[str, Any] = {}
    for name, value in dataset[row].items():
        known = name if name in inputs else columns.get(name)
        if known is None:
            what = f"no input is named {name!r}{nearest(name, [*inputs, *columns])}"
            raise UsageError(f"row {row}", what)
        values[known] = value
    values = with_sizes(inputs, values)
    return Sample(values, frozenset(values))
