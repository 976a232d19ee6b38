"""Variables of launchers are read as these write them."""

import pytest
from dstrain.runs.launch.variables import number, switched_on, world_size


@pytest.mark.parametrize(
    ("text", "on"),
    [("true", True), ("True", True), ("1", True), ("false", False), ("", False)],
)
def test_a_variable_is_switched_on_by_a_word_that_means_yes(
    text: str, on: bool
) -> None:
    assert switched_on({"A": text}, "A") == on
    assert not switched_on({}, "A")


def test_what_is_no_number_equals_none() -> None:
    assert number("2") == number(2.0) == 2
    assert number("auto") != number("auto")


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"WORLD_SIZE": "x"}, 1),
    ],
)
def test_the_number_of_processes_is_the_launchers(
    environment: dict[str, str], size: int
) -> None:
    assert world_size(environment) == size
