"""Every form is read as a table with the variant's names of columns."""

import json
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data.forms import Reading, find_source, list_columns, texts_of
from dstrain.graph import Input
from dstrain.plugin import Column

from tests.support.dataset_forms import FORMS, rows_in, write_form
from tests.support.family import write_data

INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", ("dog", "cat", "bird", "fish"))
    return tmp_path / "data"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_columns_and_captions(
    data: Path, tmp_path: Path, form: str
) -> None:
    write_form(form, data, rows_in(data), tmp_path / "x")
    source = find_source(tmp_path / "x")
    table = Reading().read(source, INPUTS)
    assert sorted(table.columns) == ["image", "prompt"]
    assert [row["prompt"] for row in table.rows] == ["dog", "cat", "bird", "fish"]
    assert Reading().read_columns(source, INPUTS).columns == table.columns
    texts = "".join(texts_of(source))
    assert source.form == "table" or "bird" in texts


def csv(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metadata.csv").write_text(content)
    return folder


def test_messages_have_the_names_of_the_file(tmp_path: Path) -> None:
    folder = csv(tmp_path, "file_name,text\na.png,b\0\n")
    table = Reading().read(find_source(folder), INPUTS)
    assert table.names_in_file == ("file_name", "text")
    with pytest.raises(UsageError) as caught:
        table.refuse(table.faults)
    assert "metadata.csv:2:text: contains a NUL" in caught.value.help_lines[0]
    (fault,) = table.faults
    assert fault.column == "prompt"


def test_a_column_that_is_chosen_takes_the_place_of_the_own_one(tmp_path: Path) -> None:
    folder = csv(tmp_path, "image,prompt,long,other\na.png,p,l,o\n")
    table = Reading({"prompt": "long"}).read(find_source(folder), INPUTS)
    assert table.columns == ("image", "prompt", "other")
    assert table.rows[0]["prompt"] == "l"
    swapped = Reading({"prompt": "image", "image": "prompt"})
    row = swapped.read(find_source(folder), INPUTS).rows[0]
    assert (row["prompt"], row["image"]) == ("a.png", "p")


def test_columns_with_lists_are_found_in_tables_of_any_format(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "y", "c": ""}, {"a": ["x"], "b": "[y]", "c": ""}]
    (tmp_path / "metadata.json").write_text(json.dumps(rows))
    assert list_columns(find_source(tmp_path, None)) == {"a"}
    csv = 'a,b\n"[""x"", ""y""]",x\n'
    other = tmp_path / "other"
    other.mkdir()
    (other / "metadata.csv").write_text(csv)
    assert list_columns(find_source(other, None)) == {"a"}
