"""The numbers of each optimizer step, as they are written: loss.csv."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from dstrain.files import write_file
from dstrain.hooks import Extensions

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
class StepLog:
    """The log of one run in its output folder; `extensions` are shown every row. Only the main process writes."""

    folder: Path
    extensions: Extensions
    is_main: bool
    _file: TextIO | None = None

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Keep loss.csv open, without the rows of steps after `step` that a run which was cut off left."""
        if not self.is_main:
            yield
            return
        path = self.folder / "loss.csv"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines[1:] if line.count(",") == len(COLUMNS) - 1]
        kept = [line for line in whole if int(line.partition(",")[0]) <= step]
        write_file(path, "".join(f"{line}\n" for line in [",".join(COLUMNS), *kept]).encode())
        with path.open("a", buffering=1) as self._file:
            yield

    def add(self, numbers: Mapping[str, float]) -> None:
        """Write one optimizer step's numbers, by column name, and show them to plugins that look on."""
        if self._file is None:
            return
        row = {"memory_gib": _memory(), **numbers}
        self.extensions.hook.dstrain_step_end(step=row["step"], numbers=row)
        self._file.write(",".join(_short(row[name]) for name in COLUMNS) + "\n")


def _memory() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
