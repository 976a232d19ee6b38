"""Several datasets as one: rows, places, signatures and digests of all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import Cell, Dataset, Fault, Table
from dstrain.data.dataset import CheckedSample
from dstrain.data.forms import find_source, join_datasets, join_sources
from dstrain.data.forms.joined import first_rows
from dstrain.plugin import Column

COLUMNS = {"image": Column("image", "image"), "prompt": Column("prompt")}


def dataset(name: str, sizes: Sequence[int], cropped: float = 0.0) -> Dataset:
    """A dataset with an image of each size."""
    rows = [{"image": f"{name}{number}.png"} for number in range(len(sizes))]
    table = Table(Path(name) / f"{name}.csv", ("image",), rows, range(2, 2 + len(rows)))
    samples = [
        CheckedSample(
            (row, 0),
            [(1, {"image": Cell("image", files=(f"{name}{row}.png",), parameters=(("sizes", ((size, size),)),))})],
            cropped,
        )
        for row, size in enumerate(sizes)
    ]  # fmt: skip
    return Dataset.of(table, samples, COLUMNS)


def test_rows_follow_each_other_and_keep_their_names() -> None:
    joined = join_datasets([dataset("a", [8, 16]), dataset("b", [16, 8, 32])], "xy")
    assert joined.sample_ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert [row["image"] for row in joined.table.rows] == [
        *("a0.png", "a1.png", "b0.png", "b1.png", "b2.png")
    ]
    assert [cells["image"].files[0] for cells in joined.rows] == [
        *("a0.png", "a1.png", "b0.png", "b1.png", "b2.png")
    ]
    assert joined.table.where(1, "image") == "a.csv:3:image"
    assert joined.table.where(4) == "b.csv:4"
    assert first_rows([2, 3, 1]) == [0, 2, 5]


def test_samples_of_one_size_share_a_group_whatever_dataset_they_are_of() -> None:
    joined = join_datasets(
        [dataset("a", [8, 16], 0.1), dataset("b", [16, 16, 32], 0.4)], "xy"
    )
    assert joined.groups.tolist() == [0, 1, 1, 1, 2]
    assert joined.cropped == pytest.approx([0.1, 0.3, 0.4])
    assert joined.weights.tolist() == [1] * 5


def test_a_fault_names_the_column_of_its_own_dataset() -> None:
    other = {**COLUMNS, "image": Column("photo", "image")}
    second = replace(dataset("b", [8]), columns=other)
    joined = join_datasets([dataset("a", [8, 8]), second], "xy")
    error = UsageError("x.png", "is bad")
    names = [joined.fault(row, "image", error).column for row in range(3)]
    assert names == ["image", "image", "photo"]
    kept = joined.without([Fault(0, "image", "is bad")])
    assert kept.fault(2, "image", error).column == "photo"


def test_rows_that_are_skipped_are_named_by_their_place_in_all() -> None:
    second = dataset("b", [8, 8]).without([Fault(1, "image", "is bad")])
    joined = join_datasets([dataset("a", [8, 8, 8]), second], "xy")
    assert joined.skipped == [Fault(4, "image", "is bad")]
    assert joined.sample_ids[:, 0].tolist() == [0, 1, 2, 3]
    assert np.all(joined.groups == 0)


def test_the_digest_is_of_all_in_their_order(tmp_path: Path) -> None:
    sources = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.csv").write_text(f"image\n{name}.png\n")
        sources.append(find_source(tmp_path / name))
    both, turned = join_sources(sources), join_sources(sources[::-1])
    assert both.parts == tuple(sources)
    assert both.in_words == "2 datasets"
    assert len({both.digest(), turned.digest(), sources[0].digest()}) == 3
    tables = [dataset(name, [8]) for name in "ab"]
    joined = join_datasets(tables, [one.digest() for one in sources])
    assert joined.table.digest == both.digest()
    # A single one is the same in both, too.
    joined = join_datasets(tables[:1], [sources[0].digest()])
    assert joined.table.digest == join_sources(sources[:1]).digest()
