"""What the loop needs of a training, of options or of a script's own parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dstrain.distributed import ProcessGroup
from dstrain.errors import Diverged, DstrainError, UsageError
from dstrain.training import TrainingModule
from dstrain.training.loader import Batch
from dstrain.training.optimizers import effective_rate
from dstrain.training.updater import Updater


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
