"""The cells of a row that do not fit together are bad, all of them, before any file is
decoded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.data import DataConfig, Dataset, Resolution, open_dataset
from dstrain.graph import Input
from dstrain.plugin import Column, EntryCount
from PIL import Image

INPUTS: Mapping[str, Input] = {
    "prompts": Column("texts", "texts"),
    "masks": Column(
        "masks", "images", mode="L", multiple=16, entries=EntryCount("prompts")
    ),
    "layers": Column(
        "image",
        "images",
        multiple=16,
        entries=EntryCount("count", more=1),
        same_size=True,
    ),
    "count": Column("count", "integer"),
}
GOOD: Mapping[str, Any] = {
    "texts": ["a", "b"],
    "masks": ["small.png", "large.png"],
    "image": ["small.png", "small.png"],
    "count": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, side in (("small", 32), ("large", 48)):
        Image.new("RGB", (side, 32)).save(tmp_path / f"{name}.png")
    return tmp_path


def opened(folder: Path, *changes: Mapping[str, Any], **settings: Any) -> Dataset:
    rows = [{**GOOD, **change} for change in changes]
    (folder / "metadata.json").write_text(json.dumps(rows))
    resolution = settings.pop("resolution", Resolution(None, None, 2**20))
    return open_dataset(DataConfig(folder, None, None, resolution, **settings), INPUTS)


def test_rows_whose_counts_differ_are_all_named_with_both_numbers(folder: Path) -> None:
    with pytest.raises(UsageError) as refused:
        opened(
            folder,
            {},
            {"masks": ["small.png"]},
            {"texts": ["a", "b", "c"], "count": 0},
            {"image": ["small.png"] * 3},
        )
    assert refused.value.what == "4 bad values"
    assert [line.strip() for line in refused.value.help_lines] == [
        "metadata.json:2:masks: has 1 entry, and texts has 2: expected 2 entries",
        "metadata.json:3:masks: has 2 entries, and texts has 3: expected 3 entries",
        "metadata.json:3:image: has 2 entries, and count is 0: expected 1 entry",
        "metadata.json:4:image: has 3 entries, and count is 1: expected 2 entries",
    ]


def test_images_of_several_sizes_are_named_unless_they_are_loaded_at_one(
    folder: Path,
) -> None:
    mixed = {"image": ["small.png", "large.png"]}
    with pytest.raises(UsageError) as refused:
        opened(folder, mixed)
    (line,) = refused.value.help_lines
    assert "image: has images of several sizes: 32 x 32, 32 x 48" in line
    assert len(opened(folder, mixed, resolution=Resolution(32, 32, 2**20)).rows) == 1


def test_what_a_row_lacks_is_compared_with_nothing(folder: Path) -> None:
    dataset = opened(folder, {"count": ""}, {"image": ""}, {"masks": ""})
    assert len(dataset.rows) == 3


def test_rows_that_do_not_fit_may_be_skipped(folder: Path) -> None:
    dataset = opened(folder, {"masks": ["small.png"]}, {}, on_bad_sample="skip")
    assert dataset.sample_ids[:, 0].tolist() == [1]
    (fault,) = dataset.skipped
    assert (fault.row, fault.column) == (0, "masks")
