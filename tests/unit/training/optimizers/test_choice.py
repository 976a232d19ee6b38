"""An optimizer is chosen by name or path, and what cannot work is refused in words."""

from typing import Any

import pytest
import torch
from dstrain import UsageError
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import (
    OPTIMIZERS,
    OptimizerChoice,
    build_optimizer,
    choice,
    choose_optimizer,
)
from torch import nn
from torch.optim import SGD


def chosen(name: str = "adamw", *arguments: str, **flags: Any) -> OptimizerChoice:
    config = OptimizerOptions(optimizer=name, optimizer_args=arguments, **flags)
    return choose_optimizer(config)


class Explodes(SGD):
    """Needs a closure, as LBFGS does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call it."""
        closure()


class Odd(SGD):
    """Refuses a number that is of the right kind."""

    def __init__(self, params: Any, lr: float, odd: int = 1) -> None:
        if odd % 2 == 0:
            raise RuntimeError("text of another program")
        super().__init__(params, lr)


class NoRate(SGD):
    """Takes no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1.0)


HERE = __name__


@pytest.mark.parametrize(
    ("name", "arguments", "where", "message"),
    [
        ("adamw8bt", (), "--optimizer", "did you mean 'adamw8bit'"),
        ("torch.optim.AdmW", (), "--optimizer", "did you mean 'AdamW'"),
        ("torch.optim", (), "--optimizer", "is not a class of optimizers"),
        ("torch.nn.Linear", (), "--optimizer", "is not a class of optimizers"),
        ("nowhere.Adam", (), "--optimizer", "nowhere.Adam needs nowhere, which is not installed"),
        ("torch.nowhere.Adam", (), "--optimizer", "torch.nowhere"),
        ("torchao.optim.AdamW8bit", (), "--optimizer", "cannot be saved"),
        ("torch.optim.LBFGS", (), "--optimizer", "no step from gradients alone"),
        (f"{HERE}.Explodes", (), "--optimizer", "no step from gradients alone"),
        (f"{HERE}.NoRate", (), "--optimizer", "takes no learning rate"),
        ("adamw", ("beta=1",), "--optimizer_args", "did you mean 'betas'"),
        ("adamw", ("betas=0.9",), "--optimizer_args", "expected betas=0.9,0.999"),
        ("adamw", ("betas=0.9,2",), "--optimizer_args", "does not work with betas"),
        ("adamw", ("lr=1",), "--optimizer_args", "given by --learning_rate"),
        ("adafactor", ("relative_step=1",), "--optimizer_args", "relative_step=True"),
        (f"{HERE}.Odd", ("odd=2",), "--optimizer_args", "does not work with odd=2"),
        ("muon", ("momentum=a",), "--optimizer_args", "expected momentum=0.95"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    name: str, arguments: tuple[str, ...], where: str, message: str
) -> None:
    with pytest.raises(UsageError) as found:
        chosen(name, *arguments)
    assert found.value.where == where
    assert message in str(found.value)
    assert "text of another program" not in str(found.value)


def test_an_absent_library_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(choice, "import_module", absent)
    with pytest.raises(UsageError) as found:
        chosen("prodigy")
    assert str(found.value).splitlines() == [
        "dstrain: error: --optimizer: prodigy needs prodigyopt, which is not installed",
        "  pip install prodigyopt",
    ]


def test_a_path_of_the_reference_is_called_with_rate_and_decay() -> None:
    found = chosen(customized_optimizer="torch.optim.RMSprop", learning_rate=0.5)
    assert found.kind is torch.optim.RMSprop
    assert found.arguments == {"lr": 0.5, "weight_decay": 0.01}
    with pytest.raises(UsageError) as refused:
        chosen(customized_optimizer="torch.optim.RMSprp")
    assert refused.value.where == "--customized_optimizer"


def test_decay_is_refused_where_there_is_none() -> None:
    assert "weight_decay" not in chosen(f"{HERE}.Odd").arguments
    with pytest.raises(UsageError, match="takes no weight decay"):
        chosen(f"{HERE}.Odd", weight_decay=0.1)


def test_prodigy_estimates_the_rate_unless_one_is_given() -> None:
    assert chosen("prodigy").rates.others == 1.0
    assert chosen("prodigyopt.Prodigy").rates.others == 1.0
    assert chosen("prodigy", learning_rate=0.5).rates.others == 0.5
    assert chosen("adamw").rates.others == 1e-4


def test_a_default_spelled_out_is_the_same_optimizer() -> None:
    assert chosen().is_default
    assert chosen("adamw", "betas=0.9,0.999", "eps=1e-8", "fused=True").is_default
    assert chosen("adamw", "betas=[0.9,0.999]").identity == chosen().identity
    assert not chosen("adamw", "eps=1e-7").is_default
    assert not chosen("torch.optim.AdamW").is_default  # not fused
    assert chosen("torch.optim.AdamW", "fused=True").is_default
    assert chosen("lion").identity != chosen().identity


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit"])
def test_paged_and_not_paged_continue_each_other(name: str) -> None:
    assert chosen(name).identity == chosen(f"paged_{name}").identity
    other = chosen(name, "min_8bit_size=1").identity
    assert other != chosen(f"paged_{name}").identity


SEVERAL_RATES: tuple[dict[str, Any], ...] = (
    {"loraplus_lr_ratio": 16.0},
    {"learning_rate": "1e-3,dit.b=1e-4"},
)
BF16 = {"trainable_dtype": "bf16"}
REFUSED = {
    "prodigy": ("--loraplus_lr_ratio", "--learning_rate", "--trainable_dtype"),
    "schedulefree": ("--trainable_dtype",),
}
"""Of all others, each works with each."""
UP = "dit.a.lora_B.default.weight"


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim.RMSprop"])
@pytest.mark.parametrize("flags", [*SEVERAL_RATES, BF16], ids="-".join)
def test_every_optimizer_takes_a_flag_or_refuses_it_by_name(
    name: str, flags: dict[str, Any]
) -> None:
    (flag,) = (f"--{one}" for one in flags)
    if flag in REFUSED.get(name, ()):
        with pytest.raises(UsageError) as found:
            chosen(name, **flags)
        assert found.value.where == flag
        assert name in found.value.what
        return
    dtype = torch.bfloat16 if flags == BF16 else torch.float32
    parameters = {
        part: nn.Parameter(torch.ones(shape, dtype=dtype))
        for part, shape in (
            (UP, (64, 4)),
            ("dit.a.weight", (8, 64)),
            ("dit.b", (8, 64)),
        )
    }
    optimizer = build_optimizer(chosen(name, **flags), parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool(one.isfinite().all()) for one in parameters.values())
    assert len(optimizer.param_groups) == (1 if flags == BF16 else 2)
