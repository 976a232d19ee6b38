"""The state of a training run."""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dstrain.distributed.world import ProcessGroup
from dstrain.models.locate import Found
from dstrain.runs.setup import Setup
from dstrain.training.loader import SampleSource
from dstrain.training.module import TrainingModule
from dstrain.training.order import Order


@dataclass(frozen=True)
class TrainingData:
    """The samples of a run: `groups` numbers the signature of each, `places` has its
    row and chunk.

    Rows that are left out have a place and no sample, as `order.with_gaps` makes them.
    """

    source: SampleSource
    groups: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    presence: frozenset[frozenset[str]]
    about: Any


@dataclass
class TrainingRun:
    """Everything a training loop holds."""

    setup: Setup
    processes: ProcessGroup
    module: TrainingModule
    model: Any
    optimizer: Optimizer
    scheduler: LRScheduler
    order: Order
    source: SampleSource
    found: Found
    steps: int
    about: Any
    step: int = 0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])


def place(run: TrainingRun, row: int) -> str:
    """Name a row of the data set; stage 2 has no table to name a line of."""
    return (
        f"row {row} (from 0)" if run.setup.stage else run.setup.dataset.table.where(row)
    )
