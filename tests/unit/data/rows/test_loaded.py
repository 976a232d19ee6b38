"""Each cell of a row is read by itself: it has a value, is blank, or is at fault."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.data import CaptionOptions, Resolution
from dstrain.data.files import FileInspector
from dstrain.data.rows.loaded import LoadedRow, read_row
from dstrain.plugin import Column
from PIL import Image

COLUMNS = {
    "prompt": Column("prompt", "text"),
    "image": Column("image", "image", multiple=16),
    "count": Column("count", "integer"),
}


def read(
    base: Path, values: Mapping[str, Any], **captions: CaptionOptions
) -> LoadedRow:
    inspector = FileInspector(COLUMNS.values(), base, (), None)
    ((row, files),) = inspector.with_files([values])
    resolution = Resolution(32, 32, 1024 * 1024)
    return read_row(7, row, COLUMNS, captions, resolution, files)


def test_what_is_wrong_with_one_cell_leaves_the_others(tmp_path: Path) -> None:
    row = read(tmp_path, {"prompt": "a", "image": "gone.png", "count": "many"})
    assert [(fault.row, fault.column) for fault in row.faults] == [
        (7, "image"),
        (7, "count"),
    ]
    assert row.cells["prompt"].literal == "a"


def test_a_blank_cell_is_no_fault(tmp_path: Path) -> None:
    row = read(tmp_path, {"prompt": "a", "image": "", "count": ""})
    assert (row.blank, row.faults) == ({"image", "count"}, [])


def test_the_largest_share_that_is_cut_off_is_kept(tmp_path: Path) -> None:
    Image.new("RGB", (64, 32)).save(tmp_path / "wide.png")
    row = read(tmp_path, {"prompt": "", "image": "wide.png", "count": 1})
    assert (row.cropped, row.is_cropped) == (0.5, True)


def test_only_captions_are_lists_of_several(tmp_path: Path) -> None:
    values = {"prompt": ["a", "b"], "image": "", "count": "1"}
    row = read(tmp_path, values, prompt=CaptionOptions())
    assert [text for _, text in row.captions["prompt"]] == ["a", "b"]
    assert row.cells["prompt"].literal == "a"
    assert [fault.column for fault in read(tmp_path, values).faults] == ["prompt"]
