"""Arguments reach a module exactly, while that lasts and no longer."""

import pytest
import torch
from dstrain.models.functional import override_positional_args
from torch import Tensor, nn


class Sum(nn.Module):
    """Adds its arguments."""

    def forward(self, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return first + second + third


def test_the_first_arguments_are_replaced_and_the_others_kept() -> None:
    module, one = Sum(), torch.ones(1)
    with override_positional_args(module, 10 * one):
        assert module(one, one, one).item() == 12
    with override_positional_args(module, 10 * one, 100 * one):
        assert module(one, one, one).item() == 111
    assert module(one, one, one).item() == 3


def test_what_would_be_rounded_arrives_as_it_is() -> None:
    module, exact = Sum(), torch.tensor([501.0])
    rounded = exact.bfloat16()
    zero = torch.zeros(1)
    with override_positional_args(module, exact):
        assert module(rounded, zero, zero).item() == 501.0 != rounded.item()


def test_nothing_is_left_behind_even_after_an_error() -> None:
    module = Sum()
    with pytest.raises(RuntimeError), override_positional_args(module, torch.ones(1)):
        raise RuntimeError
    assert not module._forward_pre_hooks
