"""Values are recognized by the kind that a unit declares."""

import pytest
import torch
from dstrain.testing.kinds import has_kind


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (torch.ones(1), "tensor", True),
        (1, "tensor", False),
        (True, "int", False),
        (None, "tensor | none", True),
        ([torch.ones(1)], "list[tensor]", True),
        ([1], "list[tensor]", False),
        ({"a": 1}, "{a: int}", True),
        ("a", "str", True),
    ],
    ids=str,
)
def test_kinds_of_values(value: object, kind: str, fits: bool) -> None:
    assert has_kind(value, kind) is fits
