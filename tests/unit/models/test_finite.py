"""Values with NaN, and weights with NaN or infinity, are found."""

from types import SimpleNamespace
from typing import Any

import torch
from dstrain import Pipeline
from dstrain.models import METHODS
from dstrain.models.finite import has_nan
from torch import nn

from tests.support.family import MODEL


def test_every_tensor_of_a_value_counts() -> None:
    good = torch.ones(2)
    bad = torch.tensor([1.0, float("nan")])
    mask = torch.tensor([0.0, -float("inf")])
    assert not has_nan([good, {"a": mask, "b": 3}, "text"])
    assert has_nan([good, {"a": bad}])
    assert has_nan(bad.to(torch.float8_e4m3fn))
    assert not has_nan(good.to(torch.float8_e4m3fn))


def test_a_damaged_weight_is_named() -> None:
    """Also in what it is stored as."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    spec: Any = SimpleNamespace(unused_parameters={}, variant="base")
    pipeline = Pipeline(spec, MODEL, {"dit": module, "vae": nn.Linear(2, 2)})
    assert pipeline.damaged(["dit", "vae"]) == []
    module[1].weight[0] = float("inf")
    (found,) = pipeline.damaged(["dit", "vae"])
    assert " dit " in found and found.endswith(" 1.weight")
    module[1] = METHODS["fp8"].store(module[1], module[1].weight * 0)
    assert pipeline.damaged(["dit"])[0].endswith(" 1.scale_0")
