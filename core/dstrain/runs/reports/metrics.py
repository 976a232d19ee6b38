"""Write the numbers of each optimizer step to loss.csv, and the same rows as JSON to
loss.jsonl; plugins and trackers get them, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dstrain.console import get_logger
from dstrain.errors import SystemFault
from dstrain.registry.hooks import Extensions
from dstrain.runs.checkpoints.directory import LOSS_CSV, LOSS_JSONL
from dstrain.runs.trackers import Trackers
from dstrain.storage.files import write_file
from dstrain.training.memory import peak_memory

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
    _files: tuple[FileIO, ...] = ()

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open both files, with the rows up to `step`.

        Those after it were left by a run that was cut off.
        """
        if not self.is_main:
            yield
            return
        table = self.folder / LOSS_CSV
        table.parent.mkdir(exist_ok=True)
        earlier = table.read_text().splitlines()[1:] if table.exists() else []
        rows = [line.split(",") for line in earlier]
        kept = [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) <= step]
        write_file(table, "".join(map(_csv, [COLUMNS, *kept])).encode())
        # From the table, so that both have the same rows.
        lines = self.folder / LOSS_JSONL
        write_file(lines, "".join(map(_json, kept)).encode())
        # Opened once, because that takes longer than a row; without a buffer, so that
        # closing writes nothing.
        with table.open("ab", 0) as csv_file, lines.open("ab", 0) as json_file:
            self._files = (csv_file, json_file)
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
        texts = [
            str(row[name]) if isinstance(row[name], int) else f"{row[name]:.6g}"
            for name in COLUMNS
        ]
        for file, line in zip(self._files, (_csv(texts), _json(texts)), strict=True):
            try:
                file.write(line.encode())
            except OSError as error:
                what = f"row {row['step']} cannot be written: {error.strerror}"
                raise SystemFault(file.name, what, "free some space") from error
        sent = {name: row[name] for name in COLUMNS if name != "step"}
        self.trackers.log(sent, int(row["step"]))


def _csv(texts: Sequence[str]) -> str:
    return ",".join(texts) + "\n"


def _json(texts: Sequence[str]) -> str:
    fields = [f'"{name}": {text}' for name, text in zip(COLUMNS, texts, strict=True)]
    return "{" + ", ".join(fields) + "}\n"
