"""A dataset says which samples are alike, which rows are left out, and which row an error
is about.
"""

from pathlib import Path

import pytest
from dstrain.data.cells import Cell
from dstrain.data.dataset import Dataset
from dstrain.data.metadata import Fault, Table
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column

COLUMNS = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
    "mode": Column("mode", same_in_batch=True),
}


def dataset(*samples: dict[str, Cell]) -> Dataset:
    """A dataset with a row for each sample, the first in line 2."""
    rows = [{"prompt": "", "image": "", "mode": "", "note": ""} for _ in samples]
    lines = range(2, 2 + len(rows))
    table = Table(Path("metadata.csv"), tuple(rows[0]), rows, lines)
    ids = tuple((row, 0) for row in range(len(rows)))
    return Dataset(table, samples, ids, COLUMNS)


def text(words: str) -> Cell:
    return Cell("text", words)


def image(height: int, width: int) -> Cell:
    sizes = ((height, width),)
    return Cell("image", files=("a.png",), parameters=(("sizes", sizes),))


def test_columns_that_feed_no_input_are_reported() -> None:
    assert dataset({}).unused_columns == ("note",)


def test_samples_are_alike_by_inputs_sizes_and_what_must_be_equal() -> None:
    wide = image(64, 96)
    data = dataset(
        {"prompt": text("a"), "input_image": wide, "mode": text("x")},
        {"prompt": text("something longer"), "input_image": wide, "mode": text("x")},
        {"prompt": text("a"), "input_image": image(96, 64), "mode": text("x")},
        {"prompt": text("a"), "input_image": wide, "mode": text("y")},
        {"prompt": text("a"), "input_image": wide},
    )
    assert data.groups == [0, 0, 1, 2, 3]


def test_rows_with_faults_are_left_out_and_listed_in_order() -> None:
    data = dataset({"prompt": text("a")}, {"prompt": text("b")}, {"prompt": text("c")})
    late, early = Fault(2, "prompt", "is blank"), Fault(0, "image", "is missing")
    kept = data.without([late, early, late])
    assert [cells["prompt"].literal for cells in kept.rows] == ["b"]
    assert kept.sample_ids == ((1, 0),)
    assert kept.skipped == [early, late]
    with pytest.raises(UsageError, match=r"metadata\.csv:3:prompt: is cut") as caught:
        kept.without([Fault(1, "prompt", "is cut")])
    assert "metadata.csv:2:image: is missing" in str(caught.value)


def test_an_error_of_an_input_names_its_cell() -> None:
    data = dataset({"input_image": image(64, 96)})
    error = UsageError("/data/a.png", "cannot be read", "fix it")
    found = data.damage(0, "input_image", error)
    assert (found.where, found.what) == (
        "metadata.csv:2:image",
        "'a.png' cannot be read",
    )
    assert found.help_lines == ("fix it",)
    assert data.damage(1, "input_image", error) is error  # of a preview


def test_an_error_of_a_block_gets_the_row_that_it_is_about() -> None:
    data = dataset({"prompt": text("a dog")})
    with pytest.raises(UsageError) as caught, data.errors_at(0):
        raise UsageError("unit f", "cannot", "do this")
    assert caught.value.where == "metadata.csv:2"
    assert (caught.value.what, caught.value.help_lines) == (
        "unit f: cannot",
        ("do this",),
    )
    with pytest.raises(UsageError) as preview, data.errors_at(1):
        raise UsageError("unit f", "cannot")
    assert preview.value.where == "unit f"
