"""What is saved and shown are averaged weights; what is trained comes back bit for bit."""

import torch
from dstrain.training.optimizers import has_modes, in_eval_mode
from schedulefree import AdamWScheduleFree
from torch import nn


def test_averaged_weights_are_there_for_a_while() -> None:
    parameter = nn.Parameter(torch.linspace(0, 1, 7))
    optimizer = AdamWScheduleFree([parameter], lr=0.1)
    optimizer.train()
    for number in range(5):
        parameter.grad = torch.linspace(-1, number, 7)
        optimizer.step()
    before = parameter.detach().clone()
    with in_eval_mode(optimizer):
        inside = parameter.detach().clone()
        assert not optimizer.param_groups[0]["train_mode"]
    assert torch.equal(parameter, before)
    assert not torch.equal(inside, before)
    assert optimizer.param_groups[0]["train_mode"]
    optimizer.eval()
    assert torch.equal(parameter, inside)


def test_others_have_one_kind_of_weights() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 1.0)
    assert not has_modes(optimizer)
    with in_eval_mode(optimizer):
        assert parameter == 0
