"""What a script gives a run beside its configuration, and what it gets from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.console import bars_hidden
from dstrain.errors import UsageError
from dstrain.graph import Task
from dstrain.runs.watched_run import STOP, Observer, WatchedRun
from dstrain.training import TrainingModule


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one optimizer step, over all processes."""

    step: int
    """The number of the step, from 1."""
    total_steps: int
    """The last step of the run."""
    epoch: int
    loss: float
    """The mean over the samples of the step."""
    learning_rate: float
    grad_norm: float
    """The norm of the gradient before it is clipped."""
    samples_per_second: float
    data_wait_seconds: float
    """How long the step waited for its samples."""
    validation_loss: float | None = None
    """The last one that was computed, before this step's save; None before the first."""

    @classmethod
    def of(
        cls,
        numbers: Mapping[str, float],
        total_steps: int,
        validation_loss: float | None = None,
    ) -> "StepNumbers":
        """Return the numbers of a step as they are logged."""
        return cls(
            step=int(numbers["step"]),
            total_steps=total_steps,
            epoch=int(numbers["epoch"]),
            loss=numbers["loss"],
            learning_rate=numbers["learning_rate"],
            grad_norm=numbers["grad_norm"],
            samples_per_second=numbers["samples_per_second"],
            data_wait_seconds=numbers["data_wait_seconds"],
            validation_loss=validation_loss,
        )


Callback = Callable[[StepNumbers], object]
"""Called after each optimizer step, in the main process; where it returns True, the run
saves what it has trained and ends.
"""


@dataclass(frozen=True)
class RunResult:
    """What a run left."""

    folder: Path
    """The folder that it writes: its output, or after stage 1 alone the feature cache."""
    weights: tuple[Path, ...] = ()
    """The files of weights saved last, one for each component that is trained."""
    losses: tuple[float, ...] = field(default=(), repr=False)
    """The loss of each step that this call has made, in order."""
    step: int = 0
    """The last step made, by earlier runs that it resumed included."""
    validation: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Step -> the numbers of logs/validation.csv that this call has computed there, in
    the main process.
    """


@dataclass(frozen=True)
class OwnParts:
    """What a script gives a run that no configuration can."""

    module_class: type[TrainingModule] = TrainingModule
    tasks: Sequence[Task] = ()
    callbacks: Sequence[Callback] = ()

    def check(self) -> None:
        """Raise UsageError for what is not of its type, before anything is done."""
        kind = self.module_class
        if not (isinstance(kind, type) and issubclass(kind, TrainingModule)):
            what = f"expected a subclass of TrainingModule, got {kind!r}"
            raise UsageError("module_class", what)
        for task in self.tasks:
            if not isinstance(task, Task):
                what = f'expected Task.of("NAME", LOSS), got {task!r}'
                raise UsageError("tasks", what)
        for one in self.callbacks:
            if not callable(one):
                raise UsageError("callbacks", f"expected functions, got {one!r}")

    def offered_tasks(self, name: str, known: Mapping[str, Task]) -> dict[str, Task]:
        """Return the tasks by name; raises UsageError for a name that is another task's,
        and for tasks of which the run trains none.
        """
        found: dict[str, Task] = {}
        for task in self.tasks:
            if task.name in known or task.name in found:
                what = f"there is another task {task.name!r}; give yours another name"
                raise UsageError("tasks", what)
            found[task.name] = task
        if found and name not in found:
            own = ", ".join(found)
            what = f"the configuration's task is {name!r}, not one of these: {own}"
            raise UsageError("tasks", what)
        return found

    def call(self, numbers: StepNumbers) -> bool:
        """Show a step's numbers to every callback; return whether one ends the run."""
        if not self.callbacks:
            return False
        with bars_hidden():
            answers = [callback(numbers) for callback in self.callbacks]
        return any(answer is True for answer in answers)


NO_PARTS = OwnParts()
"""The parts of a run of the command line."""


LOSS = "validation_loss"
"""The name under which the validation loss is reported."""


class Callbacks(Observer):
    """The callbacks of a script; their errors end the run."""

    def __init__(self, own: OwnParts) -> None:
        """Call those of these parts."""
        self.own = own
        self.validation: dict[int, Mapping[str, float]] = {}
        """Step -> the validation losses that were computed there."""

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Show a step to each callback; where one returns True, ask the run to stop."""
        last = self.validation[max(self.validation)] if self.validation else {}
        loss = last.get(LOSS)
        if self.own.call(StepNumbers.of(numbers, run.total_steps, loss)):
            run.ask(STOP)

    def reported(self, run: WatchedRun, values: Mapping[str, Any]) -> None:
        """Keep validation losses, for the next step and the result."""
        if LOSS in values:
            self.validation[run.step] = dict(values)
