"""Values and weights with NaN or infinity are found."""

import torch
from dstrain.models.finite import damaged_weight, is_finite
from torch import nn


def test_every_tensor_of_a_value_counts() -> None:
    good = torch.ones(2)
    bad = torch.tensor([1.0, float("inf")])
    assert is_finite([good, {"a": good, "b": 3}, "text"])
    assert not is_finite([good, {"a": bad}])
    assert not is_finite(torch.tensor(float("nan")))


def test_a_damaged_weight_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert damaged_weight(module) == ""
    with torch.no_grad():
        module[1].bias[0] = float("nan")
    assert damaged_weight(module) == "1.bias"
