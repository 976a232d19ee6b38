"""Columns and cells that a run cannot do without are reported before and with what is
wrong with other cells.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import DataConfig, Dataset, Resolution, open_dataset
from dstrain.graph import Input
from dstrain.plugin import Column, Measured
from PIL import Image

INPUTS: Mapping[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=16),
    "mask": Column("mask", "image"),
    "height": Measured("input_image", "height"),
}


def planned(inputs: frozenset[str], columns: tuple[str, ...]) -> None:
    for name, column in (("height", "image"), ("prompt", "prompt")):
        if name not in inputs:
            raise UsageError("base", f"needs it, and there is no column {column!r}")


def opened(folder: Path, metadata: str) -> Dataset:
    (folder / "metadata.csv").write_text(metadata)
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    return open_dataset(
        DataConfig(folder, None, None, Resolution(None, None, 2**20)), INPUTS, planned
    )


def test_blank_cells_that_are_needed_are_reported_with_the_other_bad_ones(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError) as caught:
        opened(
            tmp_path,
            "image,prompt,mask\na.png,a,\n,b,\nb.png,c,a.png\n,d,none.png\na.png\n",
        )
    assert caught.value.help_lines == (
        "metadata.csv:3:image: is blank",
        "metadata.csv:4:image: no such file 'b.png'",
        "metadata.csv:5:mask: no such file 'none.png'",
        "metadata.csv:5:image: is blank",
        "metadata.csv:6: has 1 value, but the first line names 3 columns",
    )
    assert (
        len(opened(tmp_path, "image,prompt,mask\na.png,,\na.png,a,a.png\n").rows) == 2
    )


@pytest.mark.parametrize(
    "columns, missing, absent",
    [
        (
            "image,description",
            "prompt",
            ["1 file that it names cannot be found: none.png"],
        ),
        ("file,prompt", "image", []),
        ("a.png,b", "image", []),
    ],
)
def test_a_column_that_is_missing_is_reported_before_bad_cells_with_those_there_are(
    tmp_path: Path, columns: str, missing: str, absent: list[str]
) -> None:
    with pytest.raises(UsageError, match=f"no column '{missing}'") as caught:
        opened(tmp_path, f"{columns}\nnone.png,b\n")
    assert caught.value.where == str(tmp_path / "metadata.csv")
    there = ", ".join(map(repr, columns.split(",")))
    said = [line for line in caught.value.help_lines if "--column" not in line]
    assert said == [f"columns of metadata.csv: {there}", *absent]
    likely = {"description": "prompt=description", "file": "image=file"}
    flags = [
        f"give --column {likely[one]}" for one in columns.split(",") if one in likely
    ]
    assert [line for line in caught.value.help_lines if "--column" in line] == flags


def test_rows_that_cannot_be_read_are_reported_before_columns_that_only_they_may_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "metadata.jsonl").write_text('{"image": "a.png"}\n{"image":\n')
    with pytest.raises(UsageError) as caught:
        open_dataset(
            DataConfig(tmp_path, None, None, Resolution(None, None, 2**20)),
            INPUTS,
            planned,
        )
    assert caught.value.help_lines[0].startswith("metadata.jsonl:2: is not valid JSON")
