"""An input is declared once, as a column, a size, a constant or a value of inference;
prompts that a model cannot take whole are noticed.
"""

import re
from types import SimpleNamespace

import pytest
from dstrain.graph import (
    LongPrompt,
    MaskColumn,
    as_column,
    noticing_long_prompts,
    with_measured,
)
from dstrain.plugin import (
    Column,
    Constant,
    InferenceOnly,
    Measured,
    at_least,
    between,
    functional,
    one_of,
)


@pytest.mark.parametrize("kind", ["text", "texts", "integer", "number"])
def test_a_cell_that_is_the_value_itself_names_no_file(kind: str) -> None:
    assert not Column("a", kind).is_file
    assert not Column("a", kind).from_video


@pytest.mark.parametrize(
    ("column", "file_type"),
    [
        (Column("a", "image"), "image"),
        (Column("a", "images"), "image"),
        (Column("a", "image", frame="first"), "video"),
        (Column("a", "image", frame="last"), "video"),
        (Column("a", "video"), "video"),
        (Column("a", "tensors"), "tensors"),
        (MaskColumn("a", "image", mode="L", of="input_image"), "image"),
    ],
    ids=str,
)
def test_a_files_type_is_that_of_what_it_is_read_as(
    column: Column, file_type: str
) -> None:
    assert column.is_file
    assert column.file_type == file_type
    assert column.from_video == (file_type == "video")


@pytest.mark.parametrize(
    ("value", "kind"), [("a", "text"), (1, "integer"), (1.0, "number")]
)
def test_a_constants_kind_is_that_of_its_value(
    value: str | int | float, kind: str
) -> None:
    constant = Constant(value, check=at_least(1))
    assert constant.kind == kind
    assert as_column("area", constant) == Column("area", kind, check=constant.check)


def test_checks_say_nothing_of_what_is_right_and_what_is_expected_of_the_rest() -> None:
    assert at_least(2)(2) == at_least(2)(3.5) == ""
    assert "2" in at_least(2)(1)
    check = between(0, 100)
    assert check(0) == check(99.5) == check(100) == ""
    for outside in (127, -0.5):
        assert all(number in check(outside) for number in ("0", "100", str(outside)))
    assert one_of("canny", "depth")("depth") == ""
    for wrong in ("dept", ""):
        assert "canny, depth" in one_of("canny", "depth")(wrong)
    assert one_of("canny", "depth") != one_of("canny")


def test_inference_reads_an_image_at_its_own_size_under_the_inputs_name() -> None:
    column = Column(
        "video", "image", frame="first", mode="L", multiple=16, optional=True
    )
    assert as_column("start", column) == Column("start", "image", mode="L")
    assert as_column("height", Measured("a", "height")) == Column("height", "integer")
    assert as_column("mask", InferenceOnly("image")) == Column("mask", "image")


def test_a_size_is_present_where_what_it_is_measured_on_is() -> None:
    inputs = {
        "image": Column("image", "image"),
        "height": Measured("image", "height"),
        "frames": Measured("video", "frames"),
    }
    assert with_measured(["image"], inputs) == {"image", "height"}
    assert with_measured([], inputs) == set()


class Words:
    """A tokenizer with a token for each word, and one at the end."""

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        assert options == {"add_special_tokens": False, "verbose": False}
        return SimpleNamespace(input_ids=text.split())

    def num_special_tokens_to_add(self) -> int:
        return 1

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def test_who_asks_last_is_told_of_a_prompt_that_is_cut_and_may_refuse_it() -> None:
    outer: list[LongPrompt] = []
    inner: list[LongPrompt] = []

    def refuse(found: LongPrompt) -> None:
        inner.append(found)
        raise ValueError(found.cut)

    def check(text: str) -> None:
        functional.check_length(Words(), text, 4, "T5", usual=True)

    with noticing_long_prompts(outer.append):
        check("a b c")
        assert not outer
        with noticing_long_prompts(refuse), pytest.raises(ValueError, match="d e"):
            check("a b c d e")
        check("a b c d e")
    assert inner == outer == [LongPrompt("T5", 5, 3, "d e", usual=True)]
    assert re.search(r" 5 .* T5 .* 3; .*'d e'", str(inner[0]))


def test_without_anyone_who_asks_no_prompt_is_measured() -> None:
    functional.check_length(None, "a", 0, "T5")
    functional.report_long_prompt(LongPrompt("T5", 5, 3, "d e"))
