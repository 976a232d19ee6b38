"""An optimizer is chosen by name or path; what cannot work is refused by the flag."""

import math
import sys
from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.config.named_optimizers import OPTIMIZERS
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import (
    OptimizerChoice,
    build_optimizer,
    choose_optimizer,
)
from torch import nn
from torch.optim import SGD

HERE = __name__
SOME = "pytorch_optimizer."


def chosen(name: str = "adamw", *arguments: str, **flags: Any) -> OptimizerChoice:
    config = OptimizerOptions(optimizer=name, optimizer_args=arguments, **flags)
    return choose_optimizer(config)


class Kinds(SGD):
    """Takes arguments of all kinds, what its base takes, and one without a default."""

    def __init__(
        self,
        params: Any,
        lr: float,
        needed: int,
        pair: Any = (0.9, 0.999),
        small: float = 1e-8,
        bound: float = math.inf,
        count: int = 5,
        zero: float = 0,
        flag: bool = True,
        word: str = "a",
        free: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(params, lr, **others)


class Odd(SGD):
    """Refuses a number that is of the right kind, and steps nowhere with another."""

    def __init__(self, params: Any, lr: float, odd: int = 1) -> None:
        if odd % 2 == 0:
            raise RuntimeError("text of another program")
        super().__init__(params, lr if odd == 1 else math.nan)


class NoRate(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, 1.0)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("pair=0, 0.5", (0.0, 0.5)),
        ("small=1", 1.0),
        ("bound=1e999", math.inf),
        ("count=6", 6),
        ("zero=0.9", 0.9),
        ("flag=true", True),
        ("word=abc", "abc"),
        ("free=none", None),
        ("momentum=0.5", 0.5),
    ],
)
def test_an_argument_is_of_the_kind_of_its_default(word: str, value: Any) -> None:
    arguments = chosen(f"{HERE}.Kinds", "needed=1", word).arguments
    found = arguments[word.partition("=")[0]]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("adamw8bt", "", "--optimizer: .*'adamw8bit'"),
        ("torch.optim.AdmW", "", "--optimizer: .*'AdamW'"),
        ("torch.optim", "", "--optimizer: torch.optim "),
        ("torch.nn.Linear", "", "--optimizer: torch.nn.Linear "),
        ("nowhere.Adam", "", "--optimizer: nowhere.Adam .*'nowhere'"),
        ("torch.nowhere.Adam", "", "--optimizer: .*torch.nowhere"),
        ("torchao.optim.AdamW8bit", "", "(?s)--optimizer: .*torchao .*adamw8bit"),
        ("torch.optim.LBFGS", "", "--optimizer: torch.optim.LBFGS "),
        (f"{HERE}.NoRate", "", "--optimizer: .*--learning_rate"),
        (f"{HERE}.Kinds", "", "(?s)--optimizer: .*--optimizer_args"),
        ("adamw", "beta=1", "(?s)--optimizer_args: .*'betas'.* eps"),
        ("adamw", "betas=0.9", r"--optimizer_args: .*betas like \(0.9, 0.999\)"),
        ("adamw", "eps=1 betas=0.9,2", "--optimizer_args: .*betas=.0.9, 2"),
        ("adamw", "lr=1", "--optimizer_args: .*--learning_rate"),
        ("adamw", "weight_decay=1", "--optimizer_args: .*--weight_decay"),
        ("adamw", "eps", "--optimizer_args: .*'eps'"),
        ("adamw", "a.b=1", "--optimizer_args: .*'a.b=1'"),
        ("adamw", "eps=1 eps=2", "--optimizer_args: eps "),
        ("adafactor", "relative_step=1", "--optimizer_args: .*relative_step like True"),
        (f"{HERE}.Odd", "odd=2", "--optimizer_args: .*odd=2"),
        (f"{HERE}.Odd", "odd=3", "--optimizer_args: .*odd=3"),
        ("muon", "momentum=a", "--optimizer_args: .*momentum like 0.95"),
    ],
)
def test_what_cannot_work_is_refused(name: str, arguments: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(name, *arguments.split())


def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(UsageError, match=r"(?s)--optimizer: .*pip install prodigyopt"):
        chosen("prodigy")


def test_a_path_of_the_reference_is_called_with_rate_and_decay() -> None:
    found = chosen(customized_optimizer="torch.optim.RMSprop", learning_rate=0.5)
    assert found.kind is torch.optim.RMSprop
    assert found.arguments == {"lr": 0.5, "weight_decay": 0.01}
    with pytest.raises(UsageError, match="--customized_optimizer: "):
        chosen(customized_optimizer="torch.optim.RMSprp")


def test_decay_is_refused_where_there_is_none() -> None:
    assert "weight_decay" not in chosen(f"{HERE}.Odd").arguments
    with pytest.raises(UsageError, match="--weight_decay: "):
        chosen(f"{HERE}.Odd", weight_decay=0.1)


def test_prodigy_estimates_the_rate_unless_one_is_given() -> None:
    assert chosen("prodigy").rates.others == 1.0
    assert chosen("prodigyopt.Prodigy").rates.others == 1.0
    assert chosen("prodigy", learning_rate=0.5).rates.others == 0.5
    assert chosen("adamw").rates.others == 1e-4


BF16 = {"trainable_dtype": "bf16"}
FLAGS: tuple[dict[str, Any], ...] = (
    {"loraplus_lr_ratio": 16.0},
    {"learning_rate": "1e-3,dit.b=1e-4"},
    BF16,
    {"learning_rate": 1e-3, **BF16},
)
ONE_RATE = ("--loraplus_lr_ratio", "--learning_rate")
REFUSED = {
    "prodigy": (*ONE_RATE, "--trainable_dtype"),
    f"{SOME}DAdaptAdam": ("--trainable_dtype",),
    "schedulefree": ("--trainable_dtype",),
}
"""Of all others, each works with each."""


@pytest.mark.parametrize(
    "name", [*OPTIMIZERS, "torch.optim.RMSprop", f"{SOME}DAdaptAdam"]
)
@pytest.mark.parametrize("flags", FLAGS, ids="-".join)
def test_every_optimizer_takes_a_flag_or_refuses_it_by_name(
    name: str, flags: dict[str, Any]
) -> None:
    flag = f"--{[*flags][-1]}"
    if flag in REFUSED.get(name, ()):
        with pytest.raises(UsageError, match=f"{flag}: .*{name}"):
            chosen(name, **flags)
        return
    dtype = torch.bfloat16 if "trainable_dtype" in flags else torch.float32
    shapes = {
        "dit.a.lora_B.default.weight": (64, 4),
        "dit.a.weight": (8, 64),
        "dit.b": (8, 64),
    }
    parameters = {
        part: nn.Parameter(torch.ones(shape, dtype=dtype))
        for part, shape in shapes.items()
    }
    optimizer = build_optimizer(chosen(name, **flags), parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool(one.isfinite().all()) for one in parameters.values())
    assert len(optimizer.param_groups) == (1 if "trainable_dtype" in flags else 2)


def test_the_state_is_that_after_a_step_and_large_enough_for_8_bits() -> None:
    before = torch.get_rng_state()
    (moments,) = chosen().trial["state"].values()
    assert moments["step"] == 1
    assert moments["exp_avg"].numel() >= 4096
    assert torch.equal(torch.get_rng_state(), before)
