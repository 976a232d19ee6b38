"""What is said of datasets: where they are, and what of them is read at which sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from PIL import Image

from tests.support.dataset_forms import rows_in, write_form
from tests.support.family import write, write_data
from tests.support.fixtures import FakePlugin
from tests.support.runs import train

Lines = Callable[..., list[str]]


@pytest.fixture
def lines(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Lines:
    """Return what a run logs, by default stage 1."""
    write(tmp_path / "model")
    caplog.set_level("INFO", "dstrain")

    def logged(**flags: Any) -> list[str]:
        caplog.clear()
        given = {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
        train(tmp_path, **{**given, **flags})
        return list(caplog.messages)

    return logged


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", ("dog", "cat", "bird"))
    return tmp_path / "data"


def that_begin(lines: list[str], start: str) -> list[str]:
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def sizes(lines: list[str]) -> list[str]:
    return that_begin(lines, "    ")


def test_captioned_files_that_are_not_in_a_table_that_was_found_are_counted(
    data: Path, lines: Lines
) -> None:
    (image, *_) = sorted(data.glob("*.png"))
    (data / f"{image.stem}.txt").write_text("an older caption")
    (data / "plain.png").write_bytes(image.read_bytes())
    table = data / "metadata.json"
    assert not that_begin(lines(), f"{table}: ")
    for name in ("new", "newer"):
        (data / f"{name}.png").write_bytes(image.read_bytes())
        (data / f"{name}.txt").write_text("a new caption")
    (said,) = that_begin(lines(seed=1), f"{table}: ")
    assert said == "beside it, 2 captioned files are not read, such as new.png"
    assert not that_begin(lines(dataset_metadata_path=table, seed=2), f"{table}: ")


def test_rows_without_masks_are_counted(data: Path, lines: Lines) -> None:
    table = data / "metadata.json"
    rows = json.loads(table.read_text())
    Image.new("L", (16, 16), "white").save(data / "mask.png")
    masks = ("mask.png", "", "mask.png")
    content = [{**row, "mask": one} for row, one in zip(rows, masks, strict=True)]
    table.write_text(json.dumps(content))
    (said,) = that_begin(lines(mask_column="mask"), f"{table}: ")
    assert said == "1 of 3 rows have no mask: the loss counts all of them"
    assert not that_begin(lines(seed=1), f"{table}: ")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("captions", "3 rows: image, prompt from caption files"),
        ("imagefolder csv", "3 rows: image from file_name, prompt from text"),
    ],
)
def test_the_line_of_a_dataset_has_its_rows_and_the_columns_that_are_read(
    form: str, said: str, data: Path, tmp_path: Path, lines: Lines
) -> None:
    folder = tmp_path / "form"
    write_form(form, data, rows_in(data), folder)
    own = {"dataset_base_path": str(folder), "repeats": 2, "loss_weight": 0.5}
    several = lines(dataset=(json.dumps(own),), output_path=tmp_path / "out")
    of_first, of_second = that_begin(several, f"dataset {tmp_path}")
    assert of_first == "/data/metadata.json: 3 rows: image, prompt"
    (only,) = that_begin(lines(dataset_base_path=folder), f"dataset {folder}")
    assert of_second.startswith(f"/form{only}; 2 ")
    assert of_second.endswith(" 0.5")
    # All are of one size, of which nothing is cropped away.
    assert sizes(several) == []
    assert only.endswith(said)


def test_each_size_has_a_line_with_its_samples_batches_and_what_is_cropped_away(
    tmp_path: Path, lines: Lines
) -> None:
    captions = tuple("abcdefg")
    write_data(tmp_path / "data", captions, ((16, 16), (20, 16), (16, 24), (16, 24)))
    batches = lines(task="sft", batch_size=2, max_steps=1)
    shares = {"16 x 16": "4 samples, {}10.0%", "16 x 24": "3 samples, {}0.0%"}
    shares["in all"] = "7 samples, {}5.7%"
    for found, numbers in (
        (batches, ("2 batches, ", "2 batches, ", "4 batches, ")),
        (lines(flip=True), ("", "", "")),  # variants of a sample are one
    ):
        for line, (size, share), number in zip(
            sizes(found), shares.items(), numbers, strict=True
        ):
            assert line.startswith(f"{size}: {share.format(number)}")


def test_of_many_sizes_the_most_used_are_listed(tmp_path: Path, lines: Lines) -> None:
    shapes = tuple((8 * side, 8) for side in range(1, 34))
    write_data(tmp_path / "data", ("a",) * 34, shapes)
    found = sizes(lines())
    assert len(found) == 32
    assert found[0].startswith("8 x 8: 2 samples")
    assert "3 other" in found[-2]
    assert found[-1].startswith("in all: 34 samples")


def test_columns_that_no_input_reads_are_named(data: Path, lines: Lines) -> None:
    rows = json.loads((data / "metadata.json").read_text())
    more = {"style": "flat", "note": "x"}
    (data / "metadata.json").write_text(json.dumps([{**row, **more} for row in rows]))
    (line,) = that_begin(lines(), f"dataset {data}/metadata.json: ")
    assert line == "3 rows: image, prompt; not read: style, note"


TWO_FORMS = """
from dstrain.plugin import Content, Form, Source, hookimpl
api = 2
class Red(Form):
    name = "red"
    reads = (".box",)
    def find(self, given):
        path = given.path
        is_one = path.suffix == ".box"
        return Source(self.name, path, path.parent, (path,)) if is_one else None
    def columns(self, file):
        return {"image": True, "prompt": False}
    def rows(self, file, columns):
        image = Content(lambda: [file.read_bytes()], "a.png")
        yield {"image": image, "prompt": "from " + self.name}
class Blue(Red):
    name = "blue"
@hookimpl
def dstrain_forms(options):
    return [Red(), Blue()]
"""


def test_a_file_of_two_forms_is_read_by_the_one_that_is_chosen(
    fake_plugin: FakePlugin, data: Path, lines: Lines
) -> None:
    fake_plugin("two-forms", {"two": "two_forms"}, {"two_forms": TWO_FORMS}, "dstrain")
    box = sorted(data.glob("*.png"))[0].rename(data / "a.box")
    with pytest.raises(UsageError, match="red or blue"):
        lines(dataset_base_path=box)
    said = lines(
        dataset_base_path=box, validation_dataset_base_path=box, dataset_form="blue"
    )
    found = [line for line in said if "blue file, 1 row" in line]
    assert len(found) == 2, said
