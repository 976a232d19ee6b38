"""Masks of the loss in every family: unsplit equals split, bit for bit, and what is masked
out is not trained, without a line of a family's own.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain.registry import load_family
from dstrain.runs import data_process
from dstrain.testing.family_under_test import FamilyUnderTest, processes
from dstrain.testing.rows import Size, usual_size
from dstrain.testing.split_equivalence import Outcome, differences, outcome
from dstrain.testing.trained_sets import TrainedSet
from PIL import Image

VARIANTS = (
    ("qwen_image", "base"),
    ("qwen_image", "edit"),
    ("flux", "kontext"),
    ("z_image", "omni"),
    ("flux2", "klein"),
    ("wan", "t2v"),
    ("wan", "ti2v-5b"),
    ("sdxl", "base"),
)
MASKED: dict[str, Any] = {"mask_column": "mask", "unmasked_weight": 0.1}


def with_masks(tested: FamilyUnderTest, folder: Path) -> Path:
    """Return a copy of a variant's rows, all but the last of them with a mask: the left
    half, and some of the right.
    """
    shutil.copytree(tested.data, folder)
    size: Size = usual_size(tested.spec)
    table = folder / "metadata.json"
    rows = json.loads(table.read_text())
    for number, row in enumerate(rows[:-1]):
        pixels = np.full((size.height, size.width), 255, np.uint8)
        pixels[: 8 * (number + 1), size.width // 2 :] = 0
        row["mask"] = f"mask-{number}.png"
        Image.fromarray(pixels).save(folder / row["mask"])
    rows[-1]["mask"] = ""
    table.write_text(json.dumps(rows))
    return folder


@pytest.fixture(params=VARIANTS, ids="-".join)
def tested(request: pytest.FixtureRequest, tmp_path: Path) -> FamilyUnderTest:
    name, variant = request.param
    return FamilyUnderTest(load_family(name), variant, tmp_path)


def of_latents(found: Outcome) -> list[torch.Size]:
    """The shapes of the latents and of the weights of a row."""
    values = next(iter(found.values.values()))
    return [values[name].shape for name in ("input_latents", "loss_weight")]


def test_with_masks_split_equals_unsplit_bit_for_bit(
    tested: FamilyUnderTest, tmp_path: Path
) -> None:
    lora = TrainedSet(lora=tested.family.default_trainable)
    data: dict[str, Any] = {"dataset_base_path": with_masks(tested, tmp_path / "masks")}
    plain = outcome(tested.run(tested.setup(lora, **data)))
    unsplit = outcome(tested.run(tested.setup(lora, **data, **MASKED)))
    data_process(
        tested.setup(lora, task="sft:data_process", **data, **MASKED), processes()
    )
    split = outcome(tested.run(tested.setup(lora, task="sft:train", **data, **MASKED)))
    assert differences(unsplit, split) == []
    latents, weight = of_latents(split)
    assert weight == (1, *[1] * (len(latents) - 3), *latents[-2:])
    # A row without a mask is trained as without the flag, to the last bit.
    last = max(plain.values)
    for rows, loss in plain.losses.items():
        if rows in unsplit.losses:
            is_last = rows == f"rows {last}"
            assert torch.equal(loss, unsplit.losses[rows]) == is_last, rows
