"""The step log: the same rows in logs/loss.csv and logs/loss.jsonl."""

import csv
import json
import os
from pathlib import Path

import pytest
from dstrain import Batch, SystemFault, TrainingModule
from torch import Tensor

from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "logs/loss.csv").open() as file:
        read = csv.DictReader(file)
        table = [{name: float(one) for name, one in row.items()} for row in read]
    lines = (folder / "logs/loss.jsonl").read_text().splitlines()
    assert table == [json.loads(line) for line in lines]
    return table


@pytest.mark.parametrize("torn", ["", "4", "4,0,0.5", "4,0,0.1,0.1,0.1,0.1,0.1,0"])
def test_a_resumed_run_continues_both_files_after_its_step(
    torn: str, here: Path, tmp_path: Path
) -> None:
    flags = {"output_path": tmp_path, "save_steps": 2}
    train(here, max_steps=2, **flags)
    before = rows(tmp_path)
    for name in ("loss.csv", "loss.jsonl"):
        with (tmp_path / "logs" / name).open("a") as file:
            file.write(torn)
    if not torn:
        (tmp_path / "logs/loss.jsonl").unlink()
    train(here, max_steps=5, resume="auto", **flags)
    after = rows(tmp_path)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5]
    assert after[:2] == before


def test_a_row_that_cannot_be_written_is_an_error_that_names_the_file(
    here: Path, tmp_path: Path
) -> None:
    log = tmp_path / "logs/loss.jsonl"

    class OnFullDisk(TrainingModule):
        """The disk is full after two rows."""

        steps = 0

        def forward(self, batch: Batch) -> Tensor:
            self.steps += 1
            if self.steps == 3:
                for number in os.listdir("/proc/self/fd"):
                    if os.path.realpath(f"/proc/self/fd/{number}") == str(log):
                        os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))
            return super().forward(batch)

    with pytest.raises(SystemFault, match="3") as caught:
        train(here, OnFullDisk, output_path=tmp_path)
    assert caught.value.where == str(log)
