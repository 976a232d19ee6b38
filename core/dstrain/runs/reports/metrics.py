"""The numbers of each optimizer step, as they are written: loss.csv, and the same rows
as JSON in loss.jsonl.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

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
GO_ON = "make room, then use --resume to resume from the newest checkpoint"


@dataclass
class MetricsLogger:
    """The log of one run in its output folder; `extensions` are shown every row. Only
    the main process writes.
    """

    folder: Path
    extensions: Extensions
    is_main: bool
    _files: tuple[TextIO, ...] = ()

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Keep both files open, without the rows of steps after `step` that a run which
        was cut off left.
        """
        if not self.is_main:
            yield
            return
        table, lines = self.folder / LOSS_CSV, self.folder / LOSS_JSONL
        table.parent.mkdir(exist_ok=True)
        kept = [row for row in _rows(table) if int(row[0]) <= step]
        write_file(table, "".join(map(_csv, [COLUMNS, *kept])).encode())
        write_file(
            lines, "".join(map(_json, kept)).encode()
        )  # from the table, so that both have the same rows
        self._files = (table.open("a", buffering=1), lines.open("a", buffering=1))
        try:
            yield
        finally:
            for file in self._files:
                with suppress(OSError):  # `add` said so, if a row could not be written
                    file.close()

    def add(self, numbers: Mapping[str, float]) -> None:
        """Write one optimizer step's numbers, by column name, and show them to plugins
        that look on.
        """
        if not self._files:
            return
        row = {"memory_gib": peak_memory(), **numbers}
        for reason in self.extensions.step_end(int(row["step"]), row):
            logger.warning(reason)
        texts = [_short(row[name]) for name in COLUMNS]
        for file, line in zip(self._files, (_csv(texts), _json(texts)), strict=True):
            try:
                file.write(line)
            except OSError as error:
                what = f"row {row['step']} cannot be written: {error.strerror}"
                raise SystemFault(file.name, what, GO_ON) from error


def _rows(table: Path) -> list[list[str]]:
    """Return the whole rows of a loss.csv, without its header."""
    lines = table.read_text().splitlines()[1:] if table.exists() else []
    rows = (line.split(",") for line in lines)
    return [row for row in rows if len(row) == len(COLUMNS)]


def _csv(texts: Sequence[str]) -> str:
    return ",".join(texts) + "\n"


def _json(texts: Sequence[str]) -> str:
    return (
        "{"
        + ", ".join(
            f'"{name}": {text}' for name, text in zip(COLUMNS, texts, strict=True)
        )
        + "}\n"
    )


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
