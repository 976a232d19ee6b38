"""Write the numbers of each optimizer step to loss.csv, and the same rows as JSON to
loss.jsonl; plugins and trackers get them, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.console import get_logger
from dstrain.registry import Extensions
from dstrain.runs.checkpoints.directory import LOSS_CSV, LOSS_JSONL
from dstrain.runs.reports.tables import NumberTable
from dstrain.runs.trackers import Trackers
from dstrain.training import peak_memory

logger = get_logger(__name__)


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


@dataclass
class MetricsLogger:
    """The log of one run in its output folder; only the main process writes."""

    folder: Path
    extensions: Extensions
    """Plugins, which are shown every row."""
    trackers: Trackers
    is_main: bool
    _table: NumberTable = field(init=False)

    def __post_init__(self) -> None:
        paths = self.folder / LOSS_CSV, self.folder / LOSS_JSONL
        self._table = NumberTable(*paths, COLUMNS)

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open both files, with the rows up to `step`."""
        with self._table.opened(step) if self.is_main else nullcontext():
            yield

    def add(self, numbers: Mapping[str, float]) -> None:
        """Write one optimizer step's numbers, by column name, and show them to plugins and
        trackers.
        """
        if not self.is_main:
            return
        row = {"memory_gib": peak_memory(), **numbers}
        for reason in self.extensions.step_end(int(row["step"]), row):
            logger.warning(reason)
        self._table.add(row)
        sent = {name: row[name] for name in COLUMNS if name != "step"}
        self.trackers.log(sent, int(row["step"]))
