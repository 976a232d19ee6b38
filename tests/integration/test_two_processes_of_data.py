"""Two processes draw and train what one does with the same global batch, from data as people
have it: with masks in one of two datasets, in buckets of sizes, split and unsplit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import Batch, TrainingModule, run
from PIL import Image
from torch import Tensor

from tests.support.family import write, write_data
from tests.support.processes import in_processes
from tests.support.runs import config, files, log

pytestmark = pytest.mark.usefixtures("tiny")
SIZES = ((32, 32), (24, 48))
CAPTIONS = ("dog", "two dogs", "cat", "a, b", "bird")
PROCESSES = 2
Draws = list[list[tuple[int, int, int]]]
"""Epoch, row and chunk of the samples of each step."""


def recording(place: Path) -> type[TrainingModule]:
    """A module that writes the samples of each of its batches as a line of a file; those
    that fill up a batch count nothing and are left out.
    """

    class Recording(TrainingModule):
        def forward(self, batch: Batch) -> Tensor:
            part = batch.micro_batch
            drawn = [
                (key.epoch, key.row, key.chunk)
                for key, weight in zip(part.keys, part.weights, strict=True)
                if weight
            ]
            with place.open("a") as file:
                file.write(json.dumps([drawn, part.ends_step]) + "\n")
            return super().forward(batch)

    return Recording


def drawn_by(folder: Path, *places: str) -> Draws:
    """The samples of each step, whichever process had which."""
    by_process: list[Draws] = []
    for place in places:
        steps: Draws = [[]]
        for line in (folder / place).read_text().splitlines():
            drawn, ends_step = json.loads(line)
            steps[-1] += map(tuple, drawn)
            if ends_step:
                steps.append([])
        by_process.append(steps[:-1])
    return [
        sorted(key for own in step for key in own)
        for step in zip(*by_process, strict=True)
    ]


def with_masks(folder: Path) -> dict[str, Any]:
    """A dataset with masks, and another without any, whose losses count half."""
    table = folder / "data/metadata.json"
    rows = json.loads(table.read_text())
    numbers = np.random.default_rng(0)
    for row in rows[1:]:
        with Image.open(folder / "data" / row["image"]) as image:
            width, height = image.size
        row["shape"] = f"mask-{row['image']}"
        pixels = numbers.integers(0, 256, (height, width), np.uint8)
        Image.fromarray(pixels).save(folder / "data" / row["shape"])
    table.write_text(json.dumps([{"shape": "", **row} for row in rows]))
    write_data(folder / "more", CAPTIONS[:3], SIZES)
    masked = {"mask_column": "shape", "unmasked_weight": 0.25}
    plain = {"loss_weight": 0.5, "repeats": 2}
    datasets = (
        {"dataset_base_path": str(folder / "data"), **masked},
        {"dataset_base_path": str(folder / "more"), **plain},
    )
    return {"dataset_base_path": None, "dataset": tuple(map(json.dumps, datasets))}


def test_two_processes_draw_and_train_what_one_does(tmp_path: Path) -> None:
    write(tmp_path / "model")
    write_data(tmp_path / "data", CAPTIONS, SIZES)
    flags = {
        **with_masks(tmp_path),
        "resolution": "24",
        "bucket_step": 8,
        "num_epochs": 2,
    }

    def start(name: str, place: str, **more: Any) -> None:
        given = config(tmp_path, output_path=tmp_path / name, **flags, **more)
        run(given, recording(tmp_path / place))

    # Here, so that the forks need not import what they use.
    start("one", "one-0", gradient_accumulation_steps=PROCESSES)
    wanted = drawn_by(tmp_path, "one-0")
    assert {len(step) for step in wanted} == {1, PROCESSES}  # some are filled up
    ways: dict[str, dict[str, Any]] = {
        "unsplit": {},
        # Both stages, the first of which the processes share, too.
        "split": {"feature_cache": tmp_path / "cache"},
    }
    for name, more in ways.items():

        def work(rank: int, name: str = name, more: dict[str, Any] = more) -> None:
            start(name, f"{name}-{rank}", **more)

        ended = in_processes(PROCESSES, work, tmp_path)
        assert ended.codes == (0, 0), ended.said
        places = [f"{name}-{rank}" for rank in range(PROCESSES)]
        assert drawn_by(tmp_path, *places) == wanted
        for a, b in zip(log(tmp_path / "one"), log(tmp_path / name), strict=True):
            assert a == pytest.approx(b, rel=1e-4)
        made = files(tmp_path / name)
        for file, tensors in files(tmp_path / "one").items():
            for key, tensor in tensors.items():
                assert (made[file][key] - tensor).abs().max().item() <= 1e-4
    # The two ways give the same to the last bit, on two processes as on one.
    assert log(tmp_path / "split") == log(tmp_path / "unsplit")
