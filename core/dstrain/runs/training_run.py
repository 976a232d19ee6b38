"""The state of a training run."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dstrain.distributed import ProcessGroup
from dstrain.errors import Diverged, DstrainError, UsageError
from dstrain.models import Found
from dstrain.randomness import SampleKey
from dstrain.runs.datasets.sizes import GroupSize
from dstrain.runs.feature_plan import CacheInfo
from dstrain.runs.setup import Setup
from dstrain.training import (
    CachedSamples,
    MicroBatch,
    MovingAverage,
    Order,
    Position,
    RepeatedRows,
    SampleSource,
    TrainingModule,
    load_batches,
    split_across_ranks,
)
from dstrain.training.batching import Groups, SampleIds
from dstrain.training.ema import in_eval_mode
from dstrain.training.loader import Batch
from dstrain.training.optimizers import effective_rate
from dstrain.training.sharded_networks import keeping_gradients
from dstrain.training.updater import Updater


class PartRows(NamedTuple):
    """The rows of one of several datasets."""

    end: int
    """The row after the last one."""
    repeats: int
    loss_weight: float


@dataclass(frozen=True)
class TrainingData:
    """The samples of a dataset, skipped rows included."""

    setup: Setup
    """The run with this dataset."""
    source: SampleSource
    groups: Groups
    """Sample -> number of its signature; `SKIPPED` for a row without samples."""
    sample_ids: SampleIds
    """Sample -> its row and chunk."""
    input_sets: Sequence[frozenset[str]]
    """The sets of inputs that samples have."""
    cache_info: CacheInfo | None = None
    """The record of the run that filled the feature cache; stage 2 only."""
    sizes: Sequence[GroupSize] = ()
    """Those of the samples of each signature; () where stage 1 did not record them."""
    rows_of_parts: Sequence[int] = ()
    """The rows of each of the datasets."""

    @cached_property
    def parts(self) -> Sequence[PartRows]:
        """Return what holds for the rows of each of several datasets; () for one without
        options of its own.
        """
        if not self.setup.config.dataset:
            return ()
        ends = list(accumulate(self.rows_of_parts))
        options = [part.options for part in self.setup.parts]
        own = [(one.repeats, one.loss_weight) for one in options]
        # Stage 2 need not name the dataset of --dataset_base_path.
        own = [(1, 1.0)] * (len(ends) - len(own)) + own
        return [
            PartRows(end, repeats, weight)
            for end, (repeats, weight) in zip(ends, own, strict=True)
        ]

    @property
    def repeated(self) -> tuple[RepeatedRows, ...]:
        """Return how often the rows of each of several datasets are drawn."""
        return tuple(RepeatedRows(part.end, part.repeats) for part in self.parts)

    def loss_weight(self, key: SampleKey) -> float:
        """Return what the loss of a sample is multiplied by."""
        for part in self.parts:
            if key.row < part.end:
                return part.loss_weight
        return 1.0

    def name_row(self, row: int) -> str:
        """Name a row of the dataset in messages, as stage 1 recorded it."""
        info = self.cache_info
        if info is None or not isinstance(self.source, CachedSamples):
            return self.setup.name_row(row)
        rows = self.source.rows
        return self.setup.in_words(info.name_row(rows[rows.index(row)]))


@dataclass(frozen=True)
class ValidationSamples:
    """Samples that are not trained on."""

    data: TrainingData
    """Their dataset: that of training, or a second one."""
    sample_ids: SampleIds
    """(row, chunk) of each."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return len(self.sample_ids) > 0


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """What stage 2 will train, as far as it is known before stage 1 has computed
    anything: enough to say whether it may resume.
    """

    setup: Setup
    processes: ProcessGroup
    module: TrainingModule
    order: Order
    data: TrainingData
    """The rows of the dataset, as stage 1 reads them."""
    found: Found
    """The configurations of both stages."""
    total_steps: int
    cache_info: None = None
    """Nothing is recorded yet."""


@contextmanager
def naming_rows(name_row: Callable[[int], str]) -> Iterator[None]:
    """Name the rows that a UsageError of the block is about."""
    try:
        yield
    except UsageError as error:
        if not error.rows:
            raise
        raise error.at(map(name_row, error.rows)) from error


def without_a_word(
    training: "Training", batches: Sequence[Batch], loss: float, norm: float
) -> DstrainError:
    """Return the error of a step whose loss or gradient is not finite."""
    what = f"loss {loss}, gradient norm {norm}; the weights are unchanged"
    return Diverged(f"step {training.step + 1}", what, "lower the learning rate")


@dataclass(kw_only=True)
class Training:
    """What the loop needs of a training and its progress, whether `run` has made it of
    options or a script of parts of its own.
    """

    processes: ProcessGroup
    module: TrainingModule
    model: nn.Module
    """The module as accelerate wrapped it for this process group."""
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    updater: Updater
    total_steps: int
    seed: int
    step: int = 0
    """Optimizer steps made."""
    diverged: Callable[[Any, Sequence[Batch], float, float], DstrainError] = (
        without_a_word
    )
    """Returns the error of a step whose loss or gradient is not finite."""

    keep: Callable[[], Mapping[str, Any]] = dict
    """Returns what plugins' observers keep in a state, by name."""

    def steps_of_batches(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (epoch, micro-batches of one optimizer step) from where the run is to
        its last step.
        """
        raise NotImplementedError

    def name_row(self, row: int) -> str:
        """Name a row of the dataset in messages."""
        return f"row {row}"

    def adding_up(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up in each process, to be exchanged
        with those of the last micro-batch.
        """
        context: AbstractContextManager[None] = self.processes.accelerator.no_sync(
            self.model
        )
        return context

    def after_update(self) -> None:
        """Do what follows each change of the weights, in every process."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step, of the first of several."""
        return effective_rate(self.optimizer)


@dataclass(kw_only=True)
class TrainingRun(Training):
    """A training run of options."""

    setup: Setup
    lr_scheduler: LRScheduler
    order: Order
    data: TrainingData
    found: Found
    ema: MovingAverage
    """The average of what is trained; of nothing without --ema_decay."""
    validation: ValidationSamples
    observer_states: Mapping[str, Any] = field(default_factory=dict)
    """What plugins' observers had kept in the state that was loaded, by name."""
    passed: deque[Position] = field(default_factory=deque)
    """Positions in the order from which the next batches can be cut, oldest first."""

    @property
    def cache_info(self) -> CacheInfo | None:
        """Return the record of the run that filled the feature cache; stage 2 only."""
        return self.data.cache_info

    def pass_position(self, position: Position) -> None:
        """Note a position of the batches that are loaded, which may be ahead of the
        step; forget those before the one to resume from.
        """
        self.passed.append(position)
        reached = divmod(self.step, self.order.steps_per_epoch)
        while len(self.passed) > 1:
            following = self.passed[1]
            if (following.epoch, following.batches) > reached:
                break
            self.passed.popleft()

    @property
    def position(self) -> Position | None:
        """Return the last position that the run's steps reach, None at the start of an
        epoch.
        """
        epoch, done = divmod(self.step, self.order.steps_per_epoch)
        reached = [
            position
            # A copy: the thread that loads batches may add to them.
            for position in tuple(self.passed)
            if position.epoch == epoch
            and position.draws > 0
            and position.batches <= done
        ]
        return reached[-1] if reached else None

    @property
    def is_sharded(self) -> bool:
        """Return whether each process has only some rows of what is trained."""
        return self.setup.sharding is not None

    def adding_up(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up in each process."""
        if self.is_sharded:
            return keeping_gradients(self.module)
        return super().adding_up()

    def name_row(self, row: int) -> str:
        """Name a row of the dataset in messages, as stage 1 recorded it."""
        return self.data.name_row(row)

    def after_update(self) -> None:
        """Let plugins change what is trained, and average it, their changes included."""
        with torch.no_grad():
            modify_step = self.setup.extensions.modify_step
            modify_step(self.step + 1, self.module, self.optimizer)
        self.ema.update()

    def steps_of_batches(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (epoch, micro-batches of one optimizer step), of this process."""
        per_epoch = self.order.steps_per_epoch
        workers = self.setup.config.dataset_num_workers
        while self.step < self.total_steps:
            epoch, done = divmod(self.step, per_epoch)
            batches: list[Batch] = []
            order = self.micro_batches(epoch, done)
            for batch in load_batches(self.data.source, order, workers, self.name_row):
                batches.append(batch)
                if batch.micro_batch.ends_step:
                    yield epoch, batches
                    batches = []

    def micro_batches(self, epoch: int, done: int) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches of an epoch, without the steps already done or
        beyond the last.
        """
        left = self.total_steps - self.step
        rank = self.processes.rank
        size = self.processes.size
        batch_size = self.setup.config.batch_size
        weight = self.data.loss_weight
        positions = self.position, self.pass_position
        batches = self.order.global_batches(epoch, done, *positions)
        for samples in islice(batches, left):
            yield from split_across_ranks(samples, batch_size, rank, size, weight)

    def weights_to_use(self) -> AbstractContextManager[object]:
        """Put the weights that are looked at in place of those in training: the average
        of --ema_decay, else that of the optimizer.
        """
        return self.ema.applied() if self.ema else in_eval_mode(self.optimizer)
