"""Files of a dataset that were written later are named."""

import os
from pathlib import Path

import pytest
from dstrain.data.forms import find_source
from dstrain.runs.datasets.changed import written_since
from PIL import Image


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (16, 16)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"{name}")
    for path in (folder, *folder.iterdir()):
        os.utime(path, (1000, 1000))
    return folder


def then(tmp_path: Path) -> Path:
    path = tmp_path / "plan"
    path.touch()
    os.utime(path, (2000, 2000))
    return path


def test_the_caption_that_was_written_later_is_named(
    photos: Path, tmp_path: Path
) -> None:
    source = find_source(photos)
    assert written_since(source, then(tmp_path)) == ""
    os.utime(photos / "b.txt", (3000, 3000))
    assert written_since(source, then(tmp_path)) == f"written since: {photos}/b.txt"


def test_of_a_table_the_table_is_named(photos: Path, tmp_path: Path) -> None:
    table = photos / "metadata.csv"
    table.write_text("image,prompt\na.png,a\n")
    source = find_source(photos)
    assert written_since(source, then(tmp_path)) == f"written since: {table}"


def test_without_a_dataset_or_a_moment_nothing_is_said(
    photos: Path, tmp_path: Path
) -> None:
    assert written_since(None, then(tmp_path)) == ""
    assert written_since(find_source(photos), tmp_path / "none") == ""
