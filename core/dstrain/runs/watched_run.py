"""What observers see of a run, and what they ask of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.config.options import TrainConfig
from dstrain.runs.prompt_images import Images
from dstrain.training import TrainingModule

STOP = "stop"
"""Asked for: the run saves what it has trained, and ends."""
SAVE = "save"
"""Asked for: the run saves after this step."""
INTERRUPT = "interrupt"
"""Asked for by a signal: the run saves, and ends as one that is to be resumed."""


@dataclass(kw_only=True)
class WatchedRun:
    """What observers see of a run, and what they ask of it."""

    folder: Path | None
    """The output folder; None in a script's own loop."""
    config: TrainConfig | None
    """The options; None in a script's own loop."""
    total_steps: int
    """The last step of the run."""
    steps_per_epoch: int
    is_main: bool
    """Whether this process is the one that writes."""
    module: TrainingModule
    """What is trained; `module.pipeline` has the networks."""
    images: Images | None = None
    """Makes images of the rows of `dstrain_rows`; None in a script's own loop."""
    wait: Callable[[], None]
    """Waits until every process is here; for observers that are everywhere."""
    weights_to_use: Callable[[], AbstractContextManager[object]] = nullcontext
    """Puts the weights to look at, such as the average of --ema_decay, in place."""
    step: int = 0
    """Optimizer steps made."""
    asked: frozenset[str] = frozenset()
    """What was asked for after the last step, in any process."""
    is_stopping: Callable[[], bool] = bool
    """Tells whether a signal came: what takes long ends early then."""
    message: str = ""
    """The error of a run that failed or was interrupted."""
    report: Callable[[Mapping[str, Any]], None] = field(default=lambda values: None)
    """Shows other observers more numbers, or images, of the step the run is at."""
    requests: set[str] = field(default_factory=set)

    def ask(self, what: str) -> None:
        """Ask for 'stop', 'save', or anything that another observer knows by this name;
        from any thread. All processes agree on it after the step.
        """
        self.requests.add(what)


class Observer:
    """Something that watches a run. A method does nothing unless it is overridden."""

    everywhere: bool = False
    """Whether it watches in every process, or in the main one alone."""

    def start(self, run: WatchedRun) -> None:
        """Begin, before the first step of this process; `run.step` counts those made by
        the runs that it resumes.
        """

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Look at a step that was made: its numbers, by the columns of loss.csv."""

    def saved(self, run: WatchedRun, files: Sequence[Path]) -> None:
        """Look at what was saved: one file of weights for each trained component."""

    def reported(self, run: WatchedRun, values: Mapping[str, Any]) -> None:
        """Look at numbers, images or videos that another observer has reported, by name."""

    def end(self, run: WatchedRun, how: str) -> None:
        """End: the run is 'finished', 'stopped' as it was asked to, 'interrupted' by a
        signal, or has 'failed'; `run.message` has the reason of the latter two.
        """

    def state(self) -> Any:
        """Return what a resumed run's observer needs, as JSON can hold it; None for
        nothing.
        """
        return None

    def load(self, state: Any) -> None:
        """Take what `state` has returned, before `start`."""
