"""Weights to store in fewer bytes, and the error of what is restored."""

import torch
from dstrain_memory.quantization.linear import QuantizedLinear
from dstrain_memory.quantization.method import QuantizationMethod
from torch import Tensor, nn


def normal(deviation: float, rows: int = 256, columns: int = 1024) -> Tensor:
    """Normally distributed weights (rows, columns)."""
    draws = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=draws) * deviation


def uneven() -> Tensor:
    """Rows of different scale, with outliers."""
    draws = torch.Generator().manual_seed(1)
    weight = normal(0.02) * torch.exp(torch.randn(256, 1, generator=draws) * 0.5)
    is_outlier = torch.rand(weight.shape, generator=draws) < 1e-4
    return torch.where(is_outlier, weight * 20, weight)


def stored(method: QuantizationMethod, weight: Tensor) -> QuantizedLinear:
    """A layer with this weight, stored by a method."""
    rows, columns = weight.shape
    layer = method.store(nn.Linear(columns, rows, bias=False, device="meta"), weight)
    assert isinstance(layer, QuantizedLinear)
    return layer


def error(method: QuantizationMethod, weight: Tensor) -> float:
    """The relative error of what a method restores."""
    return float((stored(method, weight).restored() - weight).norm() / weight.norm())
