"""Columns of other names are found where a table lacks the variant's own."""

import pytest
from dstrain import UsageError
from dstrain.data.forms import lacking_columns, other_names, parse_columns
from dstrain.data.forms.naming import main_column
from dstrain.graph import Input
from dstrain.plugin import Column

INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
    "edit_image": Column("edit_image", "image", optional=True),
}


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (("image", "prompt"), {}),
        (("file_name", "text"), {"image": "file_name", "prompt": "text"}),
        (("image", "caption"), {"prompt": "caption"}),
        (("image", "text", "caption"), {"prompt": "text"}),
        (("image", "prompt", "text"), {}),
        (("image", "label"), {}),
    ],
)
def test_names_of_others_stand_in_where_the_own_one_is_absent(
    columns: tuple[str, ...], wanted: dict[str, str]
) -> None:
    assert other_names(columns, INPUTS) == wanted


def test_a_column_that_the_variant_has_itself_stands_in_for_no_other() -> None:
    inputs = {**INPUTS, "more": Column("text", optional=True)}
    assert other_names(("image", "text"), inputs) == {}


def test_a_choice_is_by_the_input_or_its_column_and_wins_over_the_own_one() -> None:
    columns = ("image", "prompt", "long", "text")
    assert other_names(columns, INPUTS, {"prompt": "long"}) == {"prompt": "long"}
    assert other_names(columns, INPUTS, {"input_image": "text"}) == {"image": "text"}


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (
            {"promt": "text"},
            "no input is read from a column 'promt'; did you mean 'pro",
        ),
        ({"prompt": "txt"}, "the dataset has no column 'txt'; did you mean 'text'?"),
    ],
)
def test_a_choice_of_what_does_not_exist_is_refused(
    choices: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        other_names(("image", "text"), INPUTS, choices)
    assert said in str(caught.value)


def test_choices_are_parsed_with_commas_or_repeated() -> None:
    wanted = {"prompt": "text", "image": "picture"}
    assert parse_columns(["prompt=text, image=picture"]) == wanted
    assert parse_columns(["prompt=text", "image=picture"]) == wanted


@pytest.mark.parametrize("part", ["prompt", "=text", "prompt=", "a=b,a=c", "a=b,c=b"])
def test_choices_of_another_form_or_twice_are_refused(part: str) -> None:
    with pytest.raises(UsageError, match="--column"):
        parse_columns([part])


def test_the_main_columns_are_the_first_that_are_not_optional() -> None:
    assert main_column(INPUTS, is_file=True) == INPUTS["input_image"]
    assert main_column(INPUTS, is_file=False) == INPUTS["prompt"]
    assert main_column({}, is_file=True) is None


def test_absent_columns_are_said_with_the_flag_where_one_column_looks_like_each() -> (
    None
):
    assert lacking_columns(("path", "description"), INPUTS) == (
        "there is no column 'image' and no column 'prompt'",
        "give --column image=path,prompt=description",
    )
    assert lacking_columns(("path", "file", "description"), INPUTS) == ("", "")
    assert lacking_columns(("image", "prompt"), INPUTS) == ("", "")
