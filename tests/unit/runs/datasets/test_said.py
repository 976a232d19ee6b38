"""One line says what is read: form, rows, and which columns for which."""

from pathlib import Path

import pytest
from dstrain.data import Cell, DataConfig, Dataset, Resolution, Table, open_dataset
from dstrain.data.dataset import CheckedSample
from dstrain.graph import Input
from dstrain.plugin import Column
from dstrain.runs.datasets.said import dataset_line, short_clips

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


def test_clips_with_fewer_frames_than_asked_for_are_counted() -> None:
    lengths = (5, 9, 17, 1)
    samples = []
    for row, count in enumerate(lengths):
        parameters = (("sizes", ((8, 8),)), ("frames", tuple(range(count))))
        cell = Cell("video", files=("a",), parameters=parameters)
        samples.append(CheckedSample((row, 0), [(1, {"video": cell})]))
    table = Table(Path("a.csv"), ("video",), ({},) * len(lengths), range(2, 6))
    dataset = Dataset.of(table, samples, {"video": Column("video", "video")})
    assert short_clips(dataset, (17,)) == [
        "3 of 4 clips have fewer than --num_frames 17 frames; the shortest has 1"
    ]
    assert short_clips(dataset, (9, 17)) == [
        "2 of 4 clips have fewer frames than 9, the least of --num_frames; the shortest has 1"
    ]
    assert short_clips(dataset, (1, 17)) == []
