"""Write the numbers of each optimizer step to loss.csv, and the same rows as JSON to
loss.jsonl.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from dstrain.runs.checkpoints.directory import LOSS_CSV, LOSS_JSONL
from dstrain.runs.observers import Observer, WatchedRun
from dstrain.runs.reports.tables import NumberTable

COLUMNS = (
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "samples_per_second",
    "data_wait_seconds",
    "memory_gib",
)


class StepLog(Observer):
    """The log of one run in its output folder."""

    def __init__(self, folder: Path) -> None:
        """Write to a folder, from `start` on."""
        self.table = NumberTable(folder / LOSS_CSV, folder / LOSS_JSONL, COLUMNS)
        self.files = ExitStack()

    def start(self, run: WatchedRun) -> None:
        """Open both files, with the rows up to the step that the run is at."""
        self.files.enter_context(self.table.opened(run.step))

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self.table.add(numbers)

    def end(self, run: WatchedRun, how: str) -> None:
        """Close the files."""
        self.files.close()
