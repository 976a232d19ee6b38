"""An average over the steps is the formula, in fp32, and training never sees it."""

import pytest
import torch
from dstrain.training import MovingAverage
from torch import nn

from tests.support.runs import same

Trained = dict[str, nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Trained:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(3, generator=generator) for name in "ab"}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


@torch.no_grad()
def move(trained: Trained) -> None:
    for parameter in trained.values():
        parameter.mul_(1.25)


def copies(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.999])
def test_the_decay_rises_to_its_value_with_the_steps(decay: float) -> None:
    trained = parameters()
    expected = {name: value.double() for name, value in copies(trained).items()}
    averaged = MovingAverage(trained, decay)
    for step in range(20):
        move(trained)
        averaged.update()
        kept = min(decay, (1 + step) / (10 + step))
        for name, value in copies(trained).items():
            expected[name] = kept * expected[name] + (1 - kept) * value.double()
    assert averaged.steps == 20
    for name, value in expected.items():
        torch.testing.assert_close(averaged.tensors[name].double(), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_the_average_within_alone(dtype: torch.dtype) -> None:
    trained = parameters(dtype)
    averaged = MovingAverage(trained, 0.9)
    move(trained)
    averaged.update()
    before = copies(trained)
    average = {name: value.clone() for name, value in averaged.tensors.items()}
    rounded = {name: value.to(dtype) for name, value in average.items()}
    with averaged.applied():
        assert same(copies(trained), rounded)
    assert same(copies(trained), before)
    with pytest.raises(ZeroDivisionError), averaged.applied():
        raise ZeroDivisionError
    assert same(copies(trained), before)
    assert same(averaged.tensors, average)
    assert {value.dtype for value in average.values()} == {torch.float32}
