"""Show the steps of a run: a bar while it runs, lines at its end, and logs/state.json for programs
that watch several runs.
"""

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from dstrain.console import get_logger, number_of, progress_bar, redacted, shell_command
from dstrain.runs.checkpoints.directory import STATUS
from dstrain.runs.watched_run import Observer, WatchedRun
from dstrain.storage import write_json
from dstrain.training import peak_memory

logger = get_logger(__name__)

SECONDS = 1.0
"""The file is replaced at most as often as this."""
LOSSES_AVERAGED = 20
"""Steps of the mean that is shown: a single loss depends on its timesteps more than on what
was learned.
"""


@dataclass
class RunStatistics:
    """Count the steps of a run, their time and their losses, for the lines at its end."""

    start: float = field(default_factory=time.monotonic)
    steps: int = 0
    seconds_per_sample: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_AVERAGED))

    def add(self, numbers: Mapping[str, float]) -> None:
        """Count one optimizer step, by its numbers as they are logged."""
        self.steps += 1
        self.seconds_per_sample += 1 / numbers["samples_per_second"]
        self.losses.append(numbers["loss"])

    @property
    def mean_loss(self) -> float:
        """Return the mean of the last losses, at most `LOSSES_AVERAGED`."""
        return sum(self.losses) / len(self.losses)

    def summary(self, memory: float) -> tuple[str, ...]:
        """Return the lines that summarize the steps.

        `memory` is the peak in GiB. samples/s is that of the steps, without saves.
        """
        took = timedelta(seconds=round(time.monotonic() - self.start))
        rate = self.steps / self.seconds_per_sample
        last = f"mean of the last {number_of(len(self.losses), 'step')}"
        if len(self.losses) == 1:
            last = "of the last step"
        return (
            f"{number_of(self.steps, 'step')} in {took}, {rate:.2f} samples/s",
            f"loss {self.mean_loss:.4g} ({last})",
            f"peak memory {memory:.2f} GiB",
        )


class Bar(Observer):
    """The bar of a run."""

    def __init__(self, statistics: RunStatistics) -> None:
        """Count steps in these statistics, and show their mean loss."""
        self.statistics = statistics
        self.stack = ExitStack()
        self.bar: Any = None

    def start(self, run: WatchedRun) -> None:
        """Show the bar, at the step that the run is at."""
        bar = progress_bar("train", run.total_steps, run.step)
        self.bar = self.stack.enter_context(bar)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Show a step."""
        statistics = self.statistics
        statistics.add(numbers)
        # Short, so that a terminal of 80 columns has room for the bar.
        over = number_of(len(statistics.losses), "step")
        mean = f"loss {statistics.mean_loss:.4f} ({over})"
        rate = f"lr {numbers['learning_rate']:.2g}"
        self.bar.set_postfix_str(f"{mean} {rate}", refresh=False)
        self.bar.update()

    def end(self, run: WatchedRun, how: str) -> None:
        """Take the bar away."""
        self.stack.close()


class Summary(Observer):
    """The lines at the end of a run that was not cut off."""

    def __init__(self, statistics: RunStatistics) -> None:
        """Summarize these statistics."""
        self.statistics = statistics

    def end(self, run: WatchedRun, how: str) -> None:
        """Log what the steps took, and their loss."""
        if how in ("finished", "stopped") and self.statistics.steps:
            for line in self.statistics.summary(peak_memory()):
                logger.info(line)


class Status(Observer):
    """logs/state.json, replaced whole: stage, step, total, speed; host, process id, its start
    time and command; and at the end how the run ended, with its message.
    """

    def __init__(self, stage: str, folder: Path) -> None:
        """Write to a folder, from `start` on."""
        self.path = folder / STATUS
        self.record: dict[str, Any] = {
            "stage": stage or "unsplit",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": psutil.Process().create_time(),
            "command": redacted(shell_command(sys.argv)),
        }
        self.written = 0.0

    def start(self, run: WatchedRun) -> None:
        """Write that the run goes on."""
        self._write(run)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Note the step, and write it unless that was done within the last second."""
        self.record["samples_per_second"] = numbers["samples_per_second"]
        self.record["loss"] = numbers["loss"]
        if time.monotonic() - self.written >= SECONDS:
            self._write(run)

    def end(self, run: WatchedRun, how: str) -> None:
        """Write how the run ended."""
        self.record |= {"ended": how, "message": redacted(run.message)}
        self._write(run)

    def _write(self, run: WatchedRun) -> None:
        self.record |= {"step": run.step, "total_steps": run.total_steps}
        write_json(self.path, self.record)
        self.written = time.monotonic()
