"""An option may have one number, and others for names."""

import pytest
from dstrain import UsageError
from dstrain.config.named_numbers import parse_named_numbers, positive_float


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0.5, (0.5, {})),
        ("0.5", (0.5, {})),
        ("a=1, b.c=2", (None, {"a": 1.0, "b.c": 2.0})),
        ("3,a=1", (3.0, {"a": 1.0})),
    ],
)
def test_the_number_of_others_comes_first(
    value: float | str, want: tuple[float | None, dict[str, float]]
) -> None:
    assert parse_named_numbers("--x", value, "NAME", positive_float) == want


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "--x: is empty"),
        ("a=1,2", "expected NAME=NUMBER after the first number, got '2'"),
        ("=1", "expected NAME=NUMBER, got '=1'"),
        ("a=1,a=2", "a is given twice"),
        ("a=inf", "expected a finite number, got inf"),
        ("0", "expected more than 0, got 0"),
        ("a= b", "'b' is not a valid float"),
    ],
)
def test_what_is_neither_is_refused(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_named_numbers("--x", value, "NAME", positive_float)
