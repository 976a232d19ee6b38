"""An input is declared once, as a column, a size, a constant or a value of inference."""

import pytest
from dstrain.graph import MaskColumn, as_column, with_measured
from dstrain.graph.inputs import Kind
from dstrain.plugin import (
    Column,
    Constant,
    InferenceOnly,
    Measured,
    at_least,
    between,
    one_of,
)


@pytest.mark.parametrize("kind", ["text", "texts", "integer", "number"])
def test_a_cell_that_is_the_value_itself_names_no_file(kind: Kind) -> None:
    assert not Column("a", kind).is_file
    assert not Column("a", kind).from_video


@pytest.mark.parametrize(
    ("column", "from_video"),
    [
        (Column("a", "image"), False),
        (Column("a", "images"), False),
        (Column("a", "tensors"), False),
        (Column("a", "video"), True),
        (Column("a", "image", frame="first"), True),
        (Column("a", "image", frame="last"), True),
    ],
    ids=str,
)
def test_a_file_is_a_video_if_frames_or_one_frame_of_it_are_loaded(
    column: Column, from_video: bool
) -> None:
    assert column.is_file
    assert column.from_video == from_video


@pytest.mark.parametrize(
    ("value", "kind"), [("a", "text"), (1, "integer"), (1.0, "number")]
)
def test_a_constants_kind_is_that_of_its_value(
    value: str | int | float, kind: str
) -> None:
    constant = Constant(value, check=at_least(1))
    assert constant.kind == kind
    assert as_column("area", constant) == Column("area", kind, check=constant.check)


def test_a_number_that_is_too_small_is_refused_with_the_least() -> None:
    check = at_least(2)
    assert check(2) == ""
    assert check(3.5) == ""
    assert check(1) == "expected 2 or more, got 1"


def test_a_number_outside_a_range_is_refused_with_both_ends() -> None:
    check = between(0, 100)
    assert check(0) == check(99.5) == check(100) == ""
    assert check(127) == "expected 0 to 100, got 127"
    assert check(-0.5) == "expected 0 to 100, got -0.5"


def test_a_text_that_is_none_of_several_is_refused_with_all_of_them() -> None:
    check = one_of("canny", "depth")
    assert check("depth") == ""
    assert check("dept") == "expected one of canny, depth, got 'dept'"
    assert check != one_of("canny")


def test_inference_reads_an_image_at_its_own_size_under_the_inputs_name() -> None:
    column = Column(
        "video", "image", frame="first", mode="L", multiple=16, optional=True
    )
    assert as_column("start", column) == Column("start", "image", mode="L")
    assert column.multiple == 16


def test_inference_reads_a_size_as_an_integer_and_others_by_their_kind() -> None:
    assert as_column("height", Measured("image", "height")) == Column(
        "height", "integer"
    )
    assert as_column("mask", InferenceOnly("image")) == Column("mask", "image")
    assert as_column("area", Constant(0.5)) == Column("area", "number")


def test_a_size_is_present_where_what_it_is_measured_on_is() -> None:
    inputs = {
        "image": Column("image", "image"),
        "height": Measured("image", "height"),
        "frames": Measured("video", "frames"),
    }
    assert with_measured(["image"], inputs) == {"image", "height"}
    assert with_measured([], inputs) == set()


def test_a_column_of_masks_says_what_it_is_of() -> None:
    column = MaskColumn("mask", "image", mode="L", of="input_image")
    assert column.is_file and not column.from_video
    assert (column.of, column.not_empty) == ("input_image", False)
    assert column != Column("mask", "image", mode="L")


@pytest.mark.parametrize(
    ("column", "file_type"),
    [
        (Column("a", "images"), "image"),
        (Column("a", "image", frame="last"), "video"),
        (Column("a", "video"), "video"),
        (Column("a", "tensors"), "tensors"),
    ],
    ids=str,
)
def test_a_files_type_is_that_of_what_it_is_read_as(
    column: Column, file_type: str
) -> None:
    assert column.file_type == file_type
