"""Train with an Accelerator, a dataset and a logger of a script's own."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dstrain.console import bars_hidden, progress_bar
from dstrain.errors import Diverged, UsageError, about_rows, nearest
from dstrain.graph import Column
from dstrain.pipeline.arguments import with_sizes
from dstrain.randomness import SampleKey, digest
from dstrain.runs.script.logger import TrainingLogger
from dstrain.runs.script.parts import StepNumbers
from dstrain.training import MicroBatch, Sample, TrainingModule
from dstrain.training.copies import keep_frozen_apart
from dstrain.training.loader import Batch
from dstrain.training.optimizers import clip_gradients

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
    loop = _Loop(accelerator, dataset, module, accelerator.prepare(module), seed)
    per_epoch = math.ceil(len(dataset) / loop.per_step)
    total = num_epochs * per_epoch
    losses: list[float] = []
    with progress_bar("train", total) as bar:
        for epoch in range(num_epochs):
            for rows in loop.steps_of(epoch):
                start = time.perf_counter()
                loss = loop.backward(rows, epoch)
                norm = float(clip_gradients(parameters, max_grad_norm or math.inf))
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    what = (
                        f"loss {loss}, gradient norm {norm}; the weights are unchanged"
                    )
                    advice = "lower the learning rate"
                    raise Diverged(f"step {len(losses) + 1}", what, advice)
                rate = float(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                if lr_scheduler is not None:
                    lr_scheduler.step()
                losses.append(loss)
                bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                bar.update()
                if accelerator.is_main_process:
                    speed = len(rows) / (time.perf_counter() - start)
                    numbers = StepNumbers(
                        len(losses), total, epoch, loss, rate, norm, speed, 0.0
                    )
                    with bars_hidden():
                        logger.on_step_end(module, numbers)
            if accelerator.is_main_process:
                with bars_hidden():
                    logger.on_epoch_end(module, epoch)
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        logger.on_training_end(module, len(losses))
    accelerator.wait_for_everyone()
    return tuple(losses)


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


@dataclass(frozen=True)
class _Loop:
    """The parts of the loop that stay the same."""

    accelerator: Accelerator
    dataset: Rows
    module: TrainingModule
    model: nn.Module
    """The module as the Accelerator wrapped it."""
    seed: int

    @property
    def per_step(self) -> int:
        """Return the number of samples of a step."""
        return self.processes * int(self.accelerator.gradient_accumulation_steps)

    @property
    def processes(self) -> int:
        """Return the number of processes."""
        return int(self.accelerator.num_processes)

    def steps_of(self, epoch: int) -> Iterator[list[int]]:
        """Yield the rows of each step of an epoch, in an order that the seed decides."""
        number = int.from_bytes(digest((self.seed, epoch), "order")[:7], "little")
        shuffled = torch.randperm(
            len(self.dataset), generator=torch.Generator().manual_seed(number)
        )
        order: list[int] = shuffled.tolist()
        for start in range(0, len(order), self.per_step):
            yield order[start : start + self.per_step]

    def backward(self, rows: Sequence[int], epoch: int) -> float:
        """Add up the gradients of a step; return its loss, the mean over all its samples."""
        rank = int(self.accelerator.process_index)
        rounds = math.ceil(len(rows) / self.processes)
        losses: list[Tensor] = []
        for number in range(rounds):
            position = number * self.processes + rank
            # Every process takes part in each round; where rows end, with weight 0.
            weight = float(position < len(rows))
            row = rows[position] if weight else rows[0]
            batch = self._batch(row, epoch, weight)
            with self._adding_up(is_last=number == rounds - 1):
                with _naming_rows(), about_rows([row]):
                    loss = self.model(batch) * (1 / len(rows))
                self.module.refuse_without_gradient(loss)
                losses.append(loss.detach())
                # Processes are averaged, and accelerate divides by the accumulation steps.
                scale = self.processes * self.accelerator.gradient_accumulation_steps
                self.accelerator.backward(loss * scale)
        total = torch.stack(losses).sum()
        if self.processes > 1:
            total = cast(Tensor, self.accelerator.reduce(total, reduction="sum"))
        return float(total)

    def _adding_up(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients stay in each process, but for the last."""
        if is_last or self.processes == 1:
            return nullcontext()
        return cast(AbstractContextManager[None], self.accelerator.no_sync(self.model))

    def _batch(self, row: int, epoch: int, weight: float) -> Batch:
        sample = _sample(self.module, self.dataset, row)
        key = SampleKey(self.seed, epoch, 0, row)
        return Batch(MicroBatch([key], [weight], 1, True), [sample])


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
