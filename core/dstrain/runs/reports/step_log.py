"""Write tables of numbers by step, as CSV and the same rows as JSON objects: loss.csv and
loss.jsonl have the numbers of each optimizer step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from dstrain.errors import SystemFault
from dstrain.runs.checkpoints.directory import LOSS_CSV, LOSS_JSONL
from dstrain.runs.watched_run import Observer, WatchedRun
from dstrain.storage import write_file

NOT_FINITE = ("nan", "inf", "-inf")
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
class NumberTable:
    """A table whose first column is the step."""

    csv_path: Path
    json_path: Path
    columns: Sequence[str]
    kept: list[dict[str, float]] = field(default_factory=list)
    """The rows that were there when it was opened."""
    _files: tuple[FileIO, ...] = ()

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open both files, with the rows up to `step`.

        Those after it were left by a run that was cut off.
        """
        table = self.csv_path
        table.parent.mkdir(exist_ok=True)
        earlier = table.read_text("utf-8").splitlines()[1:] if table.exists() else []
        kept = []
        for line in earlier:
            texts = line.split(",")
            numbers = _numbers(texts)
            if len(numbers) == len(self.columns) and numbers[0] <= step:
                kept.append(texts)
                self.kept.append(dict(zip(self.columns, numbers, strict=True)))
        write_file(table, "".join(map(_csv, [self.columns, *kept])).encode())
        # From the table, so that both have the same rows.
        write_file(self.json_path, "".join(map(self._json, kept)).encode())
        # Opened once, because that takes longer than a row; without a buffer, so that
        # closing writes nothing.
        with table.open("ab", 0) as csv_file, self.json_path.open("ab", 0) as json_file:
            self._files = (csv_file, json_file)
            yield

    def add(self, row: Mapping[str, float]) -> None:
        """Write a row, by column name; raises SystemFault."""
        texts = [
            str(row[name]) if isinstance(row[name], int) else f"{row[name]:.6g}"
            for name in self.columns
        ]
        lines = (_csv(texts), self._json(texts))
        for file, line in zip(self._files, lines, strict=True):
            try:
                file.write(line.encode())
            except OSError as error:
                what = f"row {row['step']} cannot be written: {error.strerror}"
                raise SystemFault(file.name, what, "free some space") from error

    def _json(self, texts: Sequence[str]) -> str:
        fields = [
            # JSON has no other numbers than finite ones.
            f'"{name}": {"null" if text in NOT_FINITE else text}'
            for name, text in zip(self.columns, texts, strict=True)
        ]
        return "{" + ", ".join(fields) + "}\n"


def _numbers(texts: Sequence[str]) -> list[float]:
    """Return the numbers of a row; none for one that was cut off."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


def _csv(texts: Sequence[str]) -> str:
    return ",".join(texts) + "\n"


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
