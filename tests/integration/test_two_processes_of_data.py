"""Two processes draw and train what one does with the same global batch, from data as people
have it: with masks in one of two datasets, in buckets of sizes, split and unsplit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.family import write, write_data
from tests.support.two_processes import CAPTIONS, SIZES, check_two_processes

pytestmark = pytest.mark.usefixtures("tiny")


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
    check_two_processes(tmp_path, with_masks(tmp_path))
