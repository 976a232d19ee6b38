"""Values with NaN, and weights with NaN or infinity, are found."""

import torch
from dstrain.models.finite import damaged_weight, has_nan
from torch import nn


def test_every_tensor_of_a_value_counts() -> None:
    good = torch.ones(2)
    bad = torch.tensor([1.0, float("nan")])
    mask = torch.tensor([0.0, -float("inf")])
    assert not has_nan([good, {"a": mask, "b": 3}, "text"])
    assert has_nan([good, {"a": bad}])
    assert has_nan(bad.to(torch.float8_e4m3fn))
    assert not has_nan(good.to(torch.float8_e4m3fn))


def test_a_damaged_weight_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert damaged_weight(module) == ""
    with torch.no_grad():
        module[1].bias[0] = float("nan")
    assert damaged_weight(module) == "1.bias"
