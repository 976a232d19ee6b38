"""One line says what is read: form, rows, and which columns for which."""

from pathlib import Path

import pytest
from dstrain.data.images import Resolution
from dstrain.data.row_checks import DataConfig, open_dataset
from dstrain.graph.inputs import Column, Input
from dstrain.runs.datasets.said import dataset_line

from tests.support.dataset_forms import rows_in, write_form

INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image", multiple=8),
}
SAID = {
    "captions": ": folder with captions, 3 rows: image, prompt from caption files",
    "imagefolder csv": "/metadata.csv: 3 rows: image from file_name, prompt from text",
    "parquet": "/data: 2 parquet files, 3 rows: image, prompt from text; not read: test",
}


@pytest.mark.parametrize("form", SAID)
def test_the_line_says_where_what_and_which(
    data: Path, tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "x"
    write_form(form, data, rows_in(data), folder)
    if form == "parquet":
        (folder / "data/test.parquet").touch()
    given = DataConfig(folder, None, None, Resolution(None, None, 2**20))
    line = dataset_line(given.source, open_dataset(given, INPUTS))
    assert line == f"dataset {folder}{SAID[form]}"
