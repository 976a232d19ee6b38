"""Components have learning rates of their own, and no name is ignored."""

from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.config import parse_learning_rates
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import (
    build_optimizer,
    check_names,
    choose_optimizer,
    effective_rate,
)
from torch import nn
from torch.optim import Optimizer

NAMES = ("dit.blocks.0.weight", "dit.norm.weight", "text_encoder.weight")


def built(*names: str, shape: tuple[int, ...] = (2, 2), **flags: Any) -> Optimizer:
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name in names}
    return build_optimizer(choose_optimizer(OptimizerOptions(**flags)), parameters)


def groups_of(*names: str, **flags: Any) -> list[tuple[float, list[str]]]:
    groups = built(*names, **flags).state_dict()["param_groups"]
    return [(group["lr"], [names[one] for one in group["params"]]) for group in groups]


@pytest.mark.parametrize(
    ("rates", "groups"),
    [
        (0.5, [(0.5, [*NAMES])]),
        ("dit=0.5,text_encoder=0.5", [(0.5, [*NAMES])]),
        ("dit=0.5,text_encoder=0.1", [(0.5, [*NAMES[:2]]), (0.1, [NAMES[2]])]),
        ("1,dit.blocks=0.5", [(0.5, [NAMES[0]]), (1.0, [*NAMES[1:]])]),
    ],
)
def test_each_rate_is_one_group_in_the_order_of_the_parameters(
    rates: Any, groups: list[tuple[float, list[str]]]
) -> None:
    assert groups_of(*NAMES, learning_rate=rates) == groups
    assert effective_rate(built(*NAMES, learning_rate=rates)) == groups[0][0]


def test_b_matrices_learn_at_a_multiple() -> None:
    down, up = (f"dit.to_q.lora_{one}.default.weight" for one in "AB")
    flags = {"learning_rate": 0.5, "loraplus_lr_ratio": 16.0}
    assert groups_of(down, up, **flags) == [(0.5, [down]), (8.0, [up])]
    flags["loraplus_lr_ratio"] = 1.0
    assert groups_of(down, up, **flags) == [(0.5, [down, up])]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("1,dit.block=1", r"'dit\.block'.*'dit\.blocks\.0'"),
        ("dit.blocks=1,text_encoder=1", r"1 .*dit\.norm\.weight"),
    ],
)
def test_names_and_parameters_without_any_are_refused(rates: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"--learning_rate: .*{said}"):
        built(*NAMES, learning_rate=rates)


def test_an_optimizer_of_matrices_gets_no_vector() -> None:
    flags = {"optimizer": "torch.optim.Muon"}
    assert built("dit.1", **flags).param_groups
    with pytest.raises(UsageError, match=r"--optimizer: .*2D .*\[2\]"):
        built("dit.1", shape=(2,), **flags)


@pytest.mark.parametrize(
    ("rates", "components", "plain"),
    [
        ("dit=2", ("dit",), 2),
        ("dit=2", ("dit2",), 2),
        ("1,dit=2", ("dit",), 2),
        ("2,dit=2", ("dit",), 2),
        ("dit=2,vae=2", ("dit", "vae"), 2),
        ("dit=2,vae=1", ("dit", "vae"), "dit=2,vae=1"),
        ("2,dit=2", ("dit", "vae"), "2,dit=2"),
        ("dit=2,dit.blocks=1", ("dit",), "dit=2,dit.blocks=1"),
    ],
)
def test_one_rate_for_all_is_one_number_however_it_is_written(
    rates: str, components: tuple[str, ...], plain: float | str
) -> None:
    given = parse_learning_rates(rates, 1.0)
    assert check_names(given, components, {"dit": ("dit", "dit2")}).plain == plain


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ("1,text_encode=1", "'text_encode'.*'text_encoder'"),
        ("text_encoder=1", "transformer "),
    ],
)
def test_components_are_checked_before_all_loading(rates: str, said: str) -> None:
    trained = ("transformer", "text_encoder")
    with pytest.raises(UsageError, match=f"--learning_rate: .*{said}"):
        check_names(parse_learning_rates(rates, 1.0), trained, {})
