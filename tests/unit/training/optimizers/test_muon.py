"""Muon trains matrices, AdamW the rest, and to the outside it is one optimizer."""

import copy

import torch
from dstrain.training.optimizers.muon import Muon
from torch import Tensor, nn

SHAPES = ((4, 8), (8,), (2, 3, 3, 3))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def step(own: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in own:
        one.grad = torch.randn(one.shape, generator=generator)
    optimizer.step()


def values(own: list[nn.Parameter]) -> list[Tensor]:
    return [one.detach().clone() for one in own]


def test_matrices_are_those_of_muon_and_the_rest_those_of_adamw() -> None:
    own, other = parameters(), parameters()
    both = Muon(own, 0.01, 0.1)
    matrices = torch.optim.Muon(other[:1], 0.01, 0.1, adjust_lr_fn="match_rms_adamw")
    rest = torch.optim.AdamW(other[1:], 0.01, weight_decay=0.1, fused=True)
    for seed in range(3):
        step(own, both, seed)
        generator = torch.Generator().manual_seed(seed)
        for one in other:
            one.grad = torch.randn(one.shape, generator=generator)
        matrices.step()
        rest.step()
    assert all(map(torch.equal, own, other))


def test_its_state_is_one_and_continues() -> None:
    own = parameters()
    optimizer = Muon(own, 0.01)
    step(own, optimizer, 0)
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2]
    other = parameters()
    with torch.no_grad():
        for one, value in zip(other, values(own), strict=True):
            one.copy_(value)
    resumed = Muon(other, 0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(1, 3):
        step(own, optimizer, seed)
        step(other, resumed, seed)
    assert all(map(torch.equal, own, other))


def test_groups_keep_their_rates() -> None:
    own = parameters()
    groups = [{"params": own[:1], "lr": 0.5}, {"params": own[1:], "lr": 0.25}]
    optimizer = Muon(groups, 0.1)
    assert [(g["kind"], g["lr"]) for g in optimizer.param_groups] == [
        ("muon", 0.5),
        ("adamw", 0.25),
    ]
