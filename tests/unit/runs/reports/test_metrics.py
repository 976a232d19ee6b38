"""The step log: the same rows in logs/loss.csv and logs/loss.jsonl, shown to plugins, without
rows that were overtaken.
"""

import csv
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import SystemFault
from dstrain.runs.reports.metrics import COLUMNS, MetricsLogger
from dstrain.runs.trackers import Trackers

from tests.support.command_lines import toy_config

NUMBERS = {
    "step": 1, "epoch": 0, "loss": 1 / 3, "learning_rate": 1e-5, "grad_norm": 12345678.9,
    "samples_per_second": 2.0, "data_wait_seconds": 1e-9,
}  # fmt: skip


def log_in(
    folder: Path, is_main: bool = True, shown: list[Any] | None = None
) -> MetricsLogger:
    """A log whose plugins note what they are shown."""

    def step_end(step: int, numbers: Any) -> tuple[str, ...]:
        if shown is not None:
            shown.append((step, numbers))
        return ()

    extensions: Any = SimpleNamespace(step_end=step_end)
    return MetricsLogger(folder, extensions, Trackers(toy_config()), is_main)


def write(folder: Path, steps: range, after: int = 0) -> None:
    log = log_in(folder)
    with log.opened(after):
        for step in steps:
            log.add({**NUMBERS, "step": step})


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of logs/loss.csv, which are those of logs/loss.jsonl."""
    with (folder / "logs/loss.csv").open() as file:
        table = [
            {name: float(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]
    lines = [
        json.loads(line)
        for line in (folder / "logs/loss.jsonl").read_text().splitlines()
    ]
    assert table == lines
    assert all(list(line) == list(COLUMNS) for line in lines)
    return table


def test_both_files_have_a_row_for_each_step_and_plugins_see_it(tmp_path: Path) -> None:
    shown: list[Any] = []
    log = log_in(tmp_path, shown=shown)
    with log.opened(0):
        log.add(NUMBERS)
    (row,) = rows(tmp_path)
    assert {**row, "memory_gib": 0} == {
        **NUMBERS,
        "loss": 0.333333,
        "grad_norm": 1.23457e07,
        "memory_gib": 0,
    }
    assert shown == [
        (1, {**NUMBERS, "memory_gib": pytest.approx(row["memory_gib"], rel=1e-5)})
    ]
    line = (tmp_path / "logs/loss.jsonl").read_text()
    assert line.startswith(
        '{"step": 1, "epoch": 0, "loss": 0.333333, "learning_rate": 1e-05, '
    )


@pytest.mark.parametrize("torn", ["", "4", "4,0,0.5", "4,0,0.1,0.1,0.1,0.1,0.1,0"])
def test_a_resumed_run_continues_both_files_after_its_step(
    torn: str, tmp_path: Path
) -> None:
    write(tmp_path, range(1, 4))
    for name in ("logs/loss.csv", "logs/loss.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    write(tmp_path, range(3, 6), after=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_log_in_json_that_is_missing_is_made_from_the_table(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    (tmp_path / "logs/loss.jsonl").unlink()
    write(tmp_path, range(4, 5), after=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    log = log_in(tmp_path, is_main=False)
    with log.opened(0):
        log.add(NUMBERS)
    assert not list(tmp_path.iterdir())


def test_a_row_that_cannot_be_written_is_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path)
    with log.opened(0), open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log._table._files[1].fileno())
        with pytest.raises(
            SystemFault, match=r"loss\.jsonl: row 1 cannot be written: No space left"
        ):
            log.add(NUMBERS)
