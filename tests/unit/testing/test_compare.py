"""A difference is named by its position and both values."""

import torch
from dstrain.testing.compare import greatest_difference, position


def test_the_greatest_difference_is_named_by_position_and_values() -> None:
    ours = torch.zeros(2, 3, 4)
    published = torch.zeros(2, 3, 4)
    ours[1, 0, 2] = 0.5
    ours[0, 1, 1] = 9.0
    published[0, 1, 1] = float("nan")
    assert greatest_difference(ours, published) == (
        0.5,
        "most at [1, 0, 2]: 0.5, published 0",
    )


def test_a_number_that_is_none_is_the_greatest_difference() -> None:
    ours = torch.tensor([5.0, float("nan")])
    difference, where = greatest_difference(ours, torch.zeros(2))
    assert difference == float("inf")
    assert where.startswith("most at [1]: nan")


def test_other_shapes_differ_by_infinity() -> None:
    difference, where = greatest_difference(torch.zeros(2), torch.zeros(1, 2))
    assert difference == float("inf")
    assert where == "in shape: [2], published [1, 2]"


def test_a_position_is_an_index_into_the_tensor() -> None:
    tensor = torch.arange(24).view(2, 3, 4)
    assert position(tensor, 23) == "[1, 2, 3]"
    assert position(tensor, 6) == "[0, 1, 2]"
