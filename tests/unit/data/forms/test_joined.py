"""Several datasets are one: their rows, places, signatures and digests follow each
other.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.data import Dataset, Fault, Resolution
from dstrain.data.forms import find_source, join_datasets, join_sources
from dstrain.data.variants.views import AugmentationOptions
from dstrain.plugin import Column
from PIL import Image

from tests.support.datasets import open_rows


def dataset(
    folder: Path,
    name: str,
    sides: Sequence[int],
    column: str = "image",
    bad: str = "",
    **more: Any,
) -> Dataset:
    """A dataset of square images of these sides, and of a bad row if it is named."""
    (folder / name).mkdir(exist_ok=True)
    names = [f"{name}{number}.png" for number in range(len(sides))]
    for file, side in zip(names, sides, strict=True):
        Image.new("RGB", (side, side)).save(folder / name / file)
    table = "\n".join([column, *names, *[bad] * bool(bad)])
    inputs = {"image": Column(column, "image", multiple=8)}
    return open_rows(folder / name, table, inputs, on_bad_sample="skip", **more)


def test_rows_follow_each_other_and_keep_their_names(tmp_path: Path) -> None:
    parts = [dataset(tmp_path, "a", [8, 16]), dataset(tmp_path, "b", [16, 8, 32])]
    joined = join_datasets(parts, "xy")
    assert joined.sample_ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    names = ["a0.png", "a1.png", "b0.png", "b1.png", "b2.png"]
    assert [row["image"] for row in joined.table.rows] == names
    assert joined.table.rows[3]["image"] == "b1.png"
    assert [row["image"] for row in joined.table.rows[1:3]] == names[1:3]
    files = [Path(cells["image"].files[0]).name for cells in joined.rows]
    assert files == names
    both = [joined.table.where(1, "image"), joined.table.where(2)]
    assert both == ["metadata.csv:3:image", "metadata.csv:2"]


def test_samples_of_one_size_share_a_group_whatever_dataset_they_are_of(
    tmp_path: Path,
) -> None:
    parts = [dataset(tmp_path, "a", [8, 16]), dataset(tmp_path, "b", [16, 18, 17, 32])]
    joined = join_datasets(parts, "xy")
    assert joined.groups.tolist() == [0, 1, 1, 1, 1, 2]
    assert list(joined.cropped) == pytest.approx([0, 0, 0])
    assert joined.weights.tolist() == [1] * 6
    # The share that is cut off is the mean of all.
    wide = dataset(tmp_path, "c", [16], resolution=Resolution(8, 16, 1))
    tall = dataset(tmp_path, "d", [16] * 3, resolution=Resolution(8, 32, 1))
    joined = join_datasets([wide, tall, wide], "xyz")
    assert list(joined.cropped) == pytest.approx([0.5, 0.75])
    flip = AugmentationOptions(flip=True)
    cut = replace(dataset(tmp_path, "c", [16], augmentation=flip), cropped=[0.2])
    joined = join_datasets([cut, dataset(tmp_path, "d", [16])], "xy")
    assert list(joined.cropped) == pytest.approx([0.1])


def test_a_fault_names_the_column_and_the_row_of_its_own_dataset(
    tmp_path: Path,
) -> None:
    parts = [dataset(tmp_path, "a", [8, 8]), dataset(tmp_path, "b", [8], "photo")]
    joined = join_datasets(parts, "xy")
    error = UsageError("x.png", "is bad")
    names = [joined.fault(row, "image", error).column for row in range(3)]
    assert names == ["image", "image", "photo"]
    kept = joined.without([Fault(0, "image", "is bad")])
    assert kept.damage(2, "image", error).where == "metadata.csv:2:photo"


def test_columns_are_those_of_all_datasets(tmp_path: Path) -> None:
    first, _ = (dataset(tmp_path, name, [8]) for name in "ab")
    inputs = {"image": Column("image", "image"), "prompt": Column("prompt")}
    second = open_rows(tmp_path / "b", "image,prompt\nb0.png,a dog\n", inputs)
    joined = join_datasets([first, second], "xy")
    assert [*joined.columns] == ["image", "prompt"]
    assert joined.table.columns == ("image", "prompt")


def test_rows_that_are_skipped_are_named_by_their_place_in_all(tmp_path: Path) -> None:
    second = dataset(tmp_path, "b", [8], bad="none.png")
    joined = join_datasets([dataset(tmp_path, "a", [8, 8, 8]), second], "xy")
    assert [(fault.row, fault.column) for fault in joined.skipped] == [(4, "image")]
    assert joined.sample_ids[:, 0].tolist() == [0, 1, 2, 3]
    assert joined.groups.tolist() == [0] * 4


def test_the_digest_is_of_all_in_their_order(tmp_path: Path) -> None:
    tables = [dataset(tmp_path, name, [8]) for name in "ab"]
    sources = [find_source(tmp_path / name) for name in "ab"]
    both, turned = join_sources(sources), join_sources(sources[::-1])
    assert both.parts == tuple(sources)
    assert both.in_words == "2 datasets"
    assert len({both.digest(), turned.digest(), sources[0].digest()}) == 3
    joined = join_datasets(tables, [one.digest() for one in sources])
    assert joined.table.digest == both.digest()
    # A single one is the same in both, too.
    joined = join_datasets(tables[:1], [sources[0].digest()])
    assert joined.table.digest == join_sources(sources[:1]).digest()
