"""Train with an Accelerator, a dataset and a logger of a script's own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

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
from dstrain.runs.loop import run_steps
from dstrain.runs.observers import Observer, Observers, WatchedRun
from dstrain.runs.reports.progress import Bar, RunStatistics
from dstrain.runs.script.logger import TrainingLogger
from dstrain.runs.script.parts import StepNumbers
from dstrain.runs.training_run import Training
from dstrain.training import MicroBatch, Sample, TrainingModule
from dstrain.training.loader import Batch
from dstrain.training.module import keep_frozen_apart
from dstrain.training.updater import Updater

SHARDED = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
)
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
    _check(accelerator, dataset, module, logger)
    if num_epochs < 1:
        raise UsageError("num_epochs", f"expected 1 or more, got {num_epochs}")
    parameters = module.trained_parameters
    for name, number in (
        ("learning_rate", learning_rate),
        ("weight_decay", weight_decay),
    ):
        if number is not None and not number >= 0:
            raise UsageError(name, f"expected 0 or more, got {number}")
    if optimizer is None:
        if lr_scheduler is not None:
            what = "has no effect: it is the schedule of an optimizer that is not given"
            raise UsageError("lr_scheduler", what, "give that as optimizer")
        optimizer = torch.optim.AdamW(
            parameters,
            lr=LEARNING_RATE if learning_rate is None else learning_rate,
            weight_decay=WEIGHT_DECAY if weight_decay is None else weight_decay,
        )
    else:
        _refuse_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    # Networks are registered before the wrapper looks for them.
    first = _sample(module, dataset, 0)
    with _naming_rows(), about_rows([0]):
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
    return run_steps(run, _SavesNothing(), Observers(watched, processes, own))


def _refuse_numbers(**numbers: float | None) -> None:
    """Refuse numbers of AdamW beside an optimizer that is given."""
    for name, number in numbers.items():
        if number is not None:
            what = "has no effect: the optimizer that is given has its own"
            raise UsageError(name, what, "leave it out, and set it in that optimizer")


@contextmanager
def _naming_rows() -> Iterator[None]:
    """Name the rows that a UsageError of the block is about."""
    try:
        yield
    except UsageError as error:
        if not error.rows:
            raise
        raise error.at(f"row {row}" for row in error.rows) from error


def _check(
    accelerator: Accelerator,
    dataset: Rows,
    module: TrainingModule,
    logger: TrainingLogger,
) -> None:
    """Refuse what cannot be trained in this loop."""
    for name in ("on_step_end", "on_epoch_end", "on_training_end"):
        if not callable(getattr(logger, name, None)):
            what = f"{type(logger).__name__} has no method {name}"
            raise UsageError("logger", what, "such as WeightsLogger has")
    if not module.trained_parameters:
        what = "trains nothing yet"
        raise UsageError("module", what, "call its switch_to_training_mode first")
    if len(dataset) == 0:
        raise UsageError("dataset", "has no rows")
    if accelerator.mixed_precision != "no":
        raise UsageError(
            "accelerator",
            f"has mixed_precision={accelerator.mixed_precision!r}",
            "make it with 'no'; the pipeline computes in its own torch_dtype",
        )
    if accelerator.distributed_type in SHARDED:
        kind = accelerator.distributed_type.value
        what = f"is one of {kind}, which this loop does not use"
        raise UsageError(
            "accelerator", what, "give its settings to run(), by a launcher"
        )
    own, other = module.pipeline.device, accelerator.device
    if own.type != other.type:
        what = f"the pipeline is on {own}, and the Accelerator on {other}"
        advice = "load it with from_pretrained(..., device=accelerator.device)"
        raise UsageError("accelerator", what, advice)


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
            sample = _sample(self.module, self.dataset, row)
            with _naming_rows(), about_rows([row]):
                self.module.plan(sample.inputs)
            yield Batch(micro_batch, [sample])


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


class _SavesNothing:
    """Stands where a run has an output folder: what is saved is the logger's work."""

    weights: tuple[Path, ...] = ()

    def save_if_due(self, run: Training, epoch: int) -> bool:
        return False

    def save(self, run: Training, name: str) -> None:
        pass

    def stop(self, run: Training, saved: bool) -> NoReturn:
        raise KeyboardInterrupt


def _sample(module: TrainingModule, dataset: Rows, row: int) -> Sample:
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
    given: object = dataset[row]
    if not isinstance(given, Mapping):
        what = f"expected a mapping from inputs to values, got {type(given).__name__}"
        advice = 'such as {"prompt": "a dog", "image": IMAGE}'
        raise UsageError(f"row {row}", what, advice)
    for name, value in given.items():
        known = name if name in inputs else columns.get(name)
        if known is None:
            what = f"no input is named {name!r}{nearest(name, [*inputs, *columns])}"
            raise UsageError(f"row {row}", what)
        values[known] = value
    values = with_sizes(inputs, values)
    return Sample(values, frozenset(values))
