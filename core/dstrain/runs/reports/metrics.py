"""Write the numbers of each optimizer step to loss.csv, and the same rows as JSON to
loss.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.console import get_logger
from dstrain.errors import SystemFault
from dstrain.registry.hooks import Extensions
from dstrain.runs.checkpoints.directory import LOSS_CSV, LOSS_JSONL
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
    is_main: bool

    def begin(self, step: int) -> None:
        """Begin both files, or keep the rows up to `step`.

        Those after it were left by a run that was cut off.
        """
        if not self.is_main:
            return
        table = self.folder / LOSS_CSV
        table.parent.mkdir(exist_ok=True)
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        rows = [line.split(",") for line in lines]
        kept = [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) <= step]
        write_file(table, "".join(map(_csv, [COLUMNS, *kept])).encode())
        # From the table, so that both have the same rows.
        write_file(self.folder / LOSS_JSONL, "".join(map(_json, kept)).encode())

    def add(self, numbers: Mapping[str, float]) -> None:
        """Write one optimizer step's numbers, by column name, and show them to plugins."""
        if not self.is_main:
            return
        row = {"memory_gib": peak_memory(), **numbers}
        for reason in self.extensions.step_end(int(row["step"]), row):
            logger.warning(reason)
        texts = [_short(row[name]) for name in COLUMNS]
        for name, line in ((LOSS_CSV, _csv(texts)), (LOSS_JSONL, _json(texts))):
            path = self.folder / name
            try:
                with path.open("a") as file:
                    file.write(line)
            except OSError as error:
                what = f"row {row['step']} cannot be written: {error.strerror}"
                advice = "make room, then resume from the newest checkpoint: --resume"
                raise SystemFault(path, what, advice) from error


def _csv(texts: Sequence[str]) -> str:
    return ",".join(texts) + "\n"


def _json(texts: Sequence[str]) -> str:
    fields = [f'"{name}": {text}' for name, text in zip(COLUMNS, texts, strict=True)]
    return "{" + ", ".join(fields) + "}\n"


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
