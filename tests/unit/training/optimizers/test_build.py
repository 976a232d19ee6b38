"""The optimizer of a run fits what it trains."""

from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import (
    build_optimizer,
    choose_optimizer,
    effective_rate,
)
from torch import nn
from torch.optim import Optimizer


def built(*shapes: tuple[int, ...], **flags: Any) -> Optimizer:
    parameters = {
        f"dit.{i}": nn.Parameter(torch.ones(shape)) for i, shape in enumerate(shapes)
    }
    choice = choose_optimizer(OptimizerOptions(**flags))
    return build_optimizer(choice, parameters)


def test_one_rate_makes_one_group_as_ever() -> None:
    optimizer = built((2, 2), (2,), learning_rate="dit=0.5")
    (group,) = optimizer.state_dict()["param_groups"]
    assert (group["lr"], group["params"]) == (0.5, [0, 1])


def test_several_rates_make_several() -> None:
    optimizer = built((2, 2), (2,), learning_rate="1,dit.1=0.5")
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    assert effective_rate(optimizer) == 1.0


def test_an_optimizer_of_matrices_gets_no_vector() -> None:
    flags: dict[str, Any] = {"optimizer": "torch.optim.Muon"}
    assert built((4, 2), **flags).param_groups
    with pytest.raises(UsageError, match=r"takes matrices only, but dit.1 is \[2\]"):
        built((4, 2), (2,), **flags)


def test_prodigy_logs_its_estimate() -> None:
    optimizer = built((2, 2), optimizer="prodigy", optimizer_args=("d0=0.25",))
    assert effective_rate(optimizer) == 0.25


def test_matrices_of_the_state_are_laid_out_as_a_file_has_them() -> None:
    optimizer = built((8, 6), optimizer="soap")
    (parameter,) = optimizer.param_groups[0]["params"]
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        parameter.grad = torch.randn(8, 6, generator=generator)
        optimizer.step()
    kept = optimizer.state[parameter]["Q"]
    assert len(kept) == 2 and all(one.is_contiguous() for one in kept)
