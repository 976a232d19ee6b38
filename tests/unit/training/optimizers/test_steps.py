"""Every optimizer trains, and continues bit for bit, in fp32 and in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.config.named_optimizers import OPTIMIZERS
from dstrain.config.options import OptimizerOptions
from dstrain.runs.checkpoints.state import TrainingState, load_state, save_state
from dstrain.training.optimizers import (
    build_optimizer,
    choose_optimizer,
    effective_rate,
)
from dstrain.training.updater import clip_gradients
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.runs import same

FP32, BF16 = torch.float32, torch.bfloat16
IN_FP32 = ("prodigy", "schedulefree")
EIGHT_BIT = [name for name in OPTIMIZERS if "8bit" in name]


def network(dtype: torch.dtype = FP32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(dtype)


def built(name: str, module: nn.Module, *arguments: str, **flags: Any) -> Optimizer:
    parameters = {f"dit.{key}": one for key, one in module.named_parameters()}
    dtype = "bf16" if next(module.parameters()).dtype == BF16 else "fp32"
    flags = {"optimizer": name, "optimizer_args": arguments, **flags}
    options = OptimizerOptions(trainable_dtype=dtype, **flags)
    return build_optimizer(choose_optimizer(options), parameters)


def step(module: nn.Module, optimizer: Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 8, generator=generator).to(next(module.parameters()).dtype)
    loss = (module(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    torch.manual_seed(number)  # as the loop does, since some draw
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# 8-bit optimizers keep small tensors in 32 bits: toys would not try the 8 bits.
CASES = [(name, (), FP32) for name in OPTIMIZERS]
CASES += [(name, ("min_8bit_size=1",), FP32) for name in EIGHT_BIT]
CASES += [
    (name, ("min_8bit_size=1",) if name in EIGHT_BIT else (), BF16)
    for name in OPTIMIZERS
    if name not in IN_FP32
]


@pytest.mark.parametrize(("name", "arguments", "dtype"), CASES)
def test_twenty_steps_saved_and_resumed_are_those_of_one_run(
    name: str, arguments: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    module = network(dtype)
    start = [one.detach().clone() for one in module.parameters()]
    optimizer = built(name, module, *arguments)
    for number in range(20):
        step(module, optimizer, number)
    trained = {key: one.detach() for key, one in module.named_parameters()}
    state = TrainingState(20, trained, optimizer.state_dict(), {}, "", {})
    save_state(tmp_path / "state", state)
    saved = load_state(tmp_path / "state")
    other = network(dtype)
    other.load_state_dict(saved.trainable)
    resumed = built(name, other, *arguments)
    resumed.load_state_dict(saved.optimizer)
    assert same(optimizer.state_dict(), resumed.state_dict())
    for number in range(20, 30):
        assert step(other, resumed, number) == step(module, optimizer, number)
    assert same(list(module.parameters()), list(other.parameters()))
    assert same(optimizer.state_dict(), resumed.state_dict())
    assert not any(map(torch.equal, start, module.parameters()))
    assert {one.dtype for one in module.parameters()} == {dtype}
    assert effective_rate(optimizer) > 0
    values = [one for state in resumed.state.values() for one in state.values()]
    dtypes = {one.dtype for one in values if isinstance(one, Tensor)}
    assert BF16 not in dtypes
    assert torch.uint8 in dtypes or not arguments


def test_the_default_is_the_optimizer_that_always_was() -> None:
    ours, theirs = network(), network()
    own = built("adamw", ours)
    other = torch.optim.AdamW(theirs.parameters(), 1e-4, weight_decay=0.01, fused=True)
    for number in range(5):
        step(ours, own, number)
        step(theirs, other, number)
    assert same(list(ours.parameters()), list(theirs.parameters()))
    assert same(own.state_dict(), other.state_dict())


class Convolved(nn.Module):
    """A matrix, vectors, and a tensor of four axes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(8, 8)
        self.tensor = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(8, 8) -> the same shape."""
        return self.tensor(self.matrix(x)[None, None])[0].sum(0)


OF_MATRICES = {"momentum": 0.5, "nesterov": False, "ns_steps": 3}
OF_OTHERS = {"betas": (0.5, 0.8), "eps": 0.1}


@pytest.mark.parametrize(
    ("of_matrices", "of_others"), [({}, {}), (OF_MATRICES, OF_OTHERS)]
)
def test_muon_trains_matrices_and_adamw_the_rest_each_at_its_groups_rate(
    of_matrices: dict[str, Any], of_others: dict[str, Any]
) -> None:
    ours, theirs = Convolved(), Convolved()
    flags = {"learning_rate": "1e-2,dit.tensor=2e-2", "weight_decay": 0.1}
    words = [f"{name}={one}" for name, one in (of_matrices | of_others).items()]
    both = built("muon", ours, *words, **flags)
    (matrix, *vectors), tensors = theirs.matrix.parameters(), theirs.tensor.parameters()
    decay: dict[str, Any] = {"weight_decay": 0.1}
    others = (
        torch.optim.Muon(
            [matrix], 1e-2, adjust_lr_fn="match_rms_adamw", **decay, **of_matrices
        ),
        torch.optim.AdamW(vectors, 1e-2, fused=True, **decay, **of_others),
        torch.optim.AdamW(tensors, 2e-2, fused=True, **decay, **of_others),
    )
    for number in range(3):
        step(ours, both, number)
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 8, generator=generator)
        (theirs(x) - x.roll(1, 1)).square().mean().backward()
        for one in others:
            one.step()
            one.zero_grad()
    assert same(list(ours.parameters()), list(theirs.parameters()))


def with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(300, generator=generator).to(dtype)
    return parameters


def test_fp32_gradients_are_clipped_as_in_torch() -> None:
    ours, theirs = with_gradients(FP32), with_gradients(FP32)
    norm = clip_gradients(ours, 1.0)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
    assert same([one.grad for one in ours], [one.grad for one in theirs])


def test_the_norm_of_bf16_gradients_has_more_than_three_digits() -> None:
    parameters = with_gradients(BF16)
    gradients = [one.grad.double() for one in parameters[:2] if one.grad is not None]
    exact = torch.linalg.vector_norm(torch.cat(gradients))
    norm = clip_gradients(parameters, 1.0)
    assert norm.dtype == FP32
    assert abs(norm.double() / exact - 1) < 1e-6
    first = parameters[0].grad
    assert first is not None and first.dtype == BF16
    assert torch.allclose(first.double(), gradients[0] / exact, rtol=2**-7)
    before = first.clone()
    assert abs(float(clip_gradients(parameters, 10.0)) - 1) < 1e-2
    assert torch.equal(first, before)
