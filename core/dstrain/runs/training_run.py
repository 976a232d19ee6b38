"""The state of a training run."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dstrain.cache import CacheInfo
from dstrain.distributed import ProcessGroup
from dstrain.models import Found
from dstrain.runs.setup import Setup
from dstrain.runs.training_data import TrainingData, ValidationSamples
from dstrain.runs.training_progress import Training
from dstrain.training import (
    MicroBatch,
    MovingAverage,
    Order,
    Position,
    TrainingModule,
    load_batches,
    split_across_ranks,
)
from dstrain.training.ema import in_eval_mode
from dstrain.training.loader import Batch
from dstrain.training.sharded_networks import keeping_gradients


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
        if self._is_modified:
            modify = self.setup.extensions.modify_step
            with torch.no_grad():
                modify(self.step + 1, self.module, self.optimizer)
        self.ema.update()

    @cached_property
    def _is_modified(self) -> bool:
        return self.setup.extensions.implement("dstrain_modify_step")

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
