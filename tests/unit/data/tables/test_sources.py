"""Every form of a dataset is found, and read as a table with the variant's columns."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import metadata_files
from dstrain.data.tables import (
    Reading,
    find_source,
    other_names,
    parse_columns,
    texts_of,
)
from dstrain.graph import Input
from dstrain.plugin import Column

from tests.support.dataset_forms import FORMS, rows_in, write_form
from tests.support.family import write_data

CAPTIONS = ("dog", "cat", "bird", "fish")
INPUTS: dict[str, Input] = {
    "edit_image": Column("edit_image", "image", optional=True),
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
}
IN_WORDS = {
    "captions": "folder with captions",
    "imagefolder csv": "metadata.csv",
    "imagefolder jsonl": "metadata.jsonl",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", CAPTIONS)
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "x"


def refused(*given: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        find_source(*given)  # type: ignore[arg-type]  # of several types
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_found_and_has_the_same_columns_and_captions(
    data: Path, folder: Path, form: str
) -> None:
    write_form(form, data, rows_in(data), folder)
    source = find_source(folder)
    assert source.in_words == IN_WORDS[form]
    assert source.base == folder
    assert len(source.digest()) > 32
    table = Reading().read(source, INPUTS)
    assert sorted(table.columns) == ["image", "prompt"]
    assert tuple(row["prompt"] for row in table.rows) == CAPTIONS
    assert Reading().read_columns(source, INPUTS).columns == table.columns
    assert source.form == "table" or "bird" in "".join(texts_of(source))


def test_metadata_wins_over_images(data: Path) -> None:
    assert find_source(data).path == data / "metadata.json"
    assert metadata_files(data / "none") == []


def test_what_is_no_dataset_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").touch()
    error = refused(tmp_path, None, "--validation_dataset")
    assert error.where == str(tmp_path)
    for named in (".jsonl", "dog.txt", "--validation_dataset_metadata"):
        assert named in str(error)
    for name in ("metadata.csv", "metadata.json"):
        (tmp_path / name).touch()
    assert "metadata.csv and metadata.json" in refused(tmp_path).what


def test_a_file_or_a_name_misspelt_is_answered_with_what_to_type(data: Path) -> None:
    table = data / "metadata.json"
    error = refused(table)
    assert error.where == "--dataset_base_path"
    assert f" {data} --dataset_metadata_path {table}" in error.what
    image = refused(data / "0.png")
    assert "--dataset_metadata_path" not in image.what
    assert "'data'?" in refused(data.with_name("date")).what
    assert refused(data / "none").where == "--dataset_base_path"


# Names of columns.


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ("image prompt", {}),
        ("file_name text", {"image": "file_name", "prompt": "text"}),
        ("image caption", {"prompt": "caption"}),
        ("image text caption", {"prompt": "text"}),
        ("image prompt text", {}),
        ("image label", {}),
    ],
)
def test_names_of_others_stand_in_where_the_own_one_is_absent(
    columns: str, wanted: dict[str, str]
) -> None:
    assert other_names(columns.split(), INPUTS) == wanted


def test_a_choice_is_by_the_input_or_its_column_and_wins_over_the_own_one() -> None:
    columns = ("image", "prompt", "long", "text")
    assert other_names(columns, INPUTS, {"prompt": "long"}) == {"prompt": "long"}
    assert other_names(columns, INPUTS, {"input_image": "text"}) == {"image": "text"}
    # A column that is chosen stands in for no other.
    assert other_names(("text",), INPUTS, {"image": "text"}) == {"image": "text"}
    # A column that the variant has itself stands in for no other.
    own: dict[str, Input] = {**INPUTS, "more": Column("text", optional=True)}
    assert other_names(("image", "text"), own) == {}


@pytest.mark.parametrize(
    ("choices", "meant"),
    [({"promt": "text"}, "'prompt'"), ({"prompt": "txt"}, "'text'")],
)
def test_a_choice_of_nothing_is_refused(choices: dict[str, str], meant: str) -> None:
    with pytest.raises(UsageError, match=meant) as caught:
        other_names(("image", "text"), INPUTS, choices)
    assert caught.value.where == "--column"


def test_choices_are_parsed_with_commas_or_repeated_and_no_other_form() -> None:
    wanted = {"prompt": "text", "image": "picture"}
    assert parse_columns(["prompt=text, image=picture"]) == wanted
    assert parse_columns(["prompt=text", "image=picture"]) == wanted
    for part in ("prompt", "=text", "prompt=", "a=b,a=c", "a=b,c=b"):
        with pytest.raises(UsageError) as caught:
            parse_columns([part])
        assert caught.value.where == "--column"


def test_messages_have_the_names_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,b\0\n")
    table = Reading().read(find_source(tmp_path), INPUTS)
    assert table.names_in_file == ("file_name", "text")
    (fault,) = table.faults
    assert fault.column == "prompt"
    assert table.where(0, "prompt") == "metadata.csv:2:text"


def test_a_column_that_is_chosen_takes_the_place_of_the_own_one(tmp_path: Path) -> None:
    table = "image,prompt,long,other\na.png,p,l,o\n"
    (tmp_path / "metadata.csv").write_text(table)
    source = find_source(tmp_path)
    chosen = Reading({"prompt": "long"}).read(source, INPUTS)
    assert chosen.columns == ("image", "prompt", "other")
    assert chosen.rows[0]["prompt"] == "l"
    swapped = Reading({"prompt": "image", "image": "prompt"})
    row = swapped.read(source, INPUTS).rows[0]
    assert (row["prompt"], row["image"]) == ("a.png", "p")
