"""Every optimizer with a name trains, and continues bit for bit from its saved state."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.config import flags
from dstrain.config.options import OptimizerOptions
from dstrain.runs.checkpoints.state import TrainingState, load_state, save_state
from dstrain.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    choose_optimizer,
    effective_rate,
    has_modes,
    named,
)
from torch import nn

from tests.support.runs import same

EIGHT_BIT = [name for name in OPTIMIZERS if "8bit" in name]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def built(name: str, module: nn.Module, *arguments: str) -> torch.optim.Optimizer:
    config = OptimizerOptions(optimizer=name, optimizer_args=arguments)
    parameters = {f"dit.{key}": one for key, one in module.named_parameters()}
    return build_optimizer(choose_optimizer(config), parameters)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 8, generator=generator)
    loss = (module(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    torch.manual_seed(number)  # as the loop does, since some draw
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# 8-bit optimizers keep small tensors in 32 bits: toys would not try the 8 bits.
CASES: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in OPTIMIZERS]
CASES += [(name, ("min_8bit_size=1",)) for name in EIGHT_BIT]


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_twenty_steps_saved_and_resumed_are_those_of_one_run(
    name: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    module = network()
    start = [one.detach().clone() for one in module.parameters()]
    optimizer = built(name, module, *arguments)
    losses = [step(module, optimizer, number) for number in range(20)]
    trained = {key: one.detach() for key, one in module.named_parameters()}
    state = TrainingState(20, trained, optimizer.state_dict(), {}, "", {})
    save_state(tmp_path / "state", state)
    saved = load_state(tmp_path / "state")
    other = network()
    for key, parameter in other.named_parameters():
        parameter.data.copy_(saved.trainable[key])
    resumed = built(name, other, *arguments)
    resumed.load_state_dict(saved.optimizer)
    for number in range(20, 30):
        losses.append(step(module, optimizer, number))
        assert step(other, resumed, number) == losses[-1]
    assert same(list(module.parameters()), list(other.parameters()))
    assert same(optimizer.state_dict(), resumed.state_dict())
    assert not any(
        torch.equal(a, b) for a, b in zip(start, module.parameters(), strict=True)
    )
    assert effective_rate(optimizer) > 0


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_8_bit_states_are_of_8_bits(name: str) -> None:
    module = network()
    optimizer = built(name, module, "min_8bit_size=1")
    step(module, optimizer, 0)
    states = optimizer.state.values()
    kept = [one for state in states for one in state.values()]
    assert torch.uint8 in [one.dtype for one in kept if isinstance(one, torch.Tensor)]


def test_the_default_is_the_optimizer_that_always_was() -> None:
    ours, theirs = network(), network()
    own = built("adamw", ours)
    other = torch.optim.AdamW(theirs.parameters(), 1e-4, weight_decay=0.01, fused=True)
    for number in range(5):
        step(ours, own, number)
        step(theirs, other, number)
    assert same(list(ours.parameters()), list(theirs.parameters()))
    assert same(own.state_dict(), other.state_dict())


def test_what_needs_modes_is_in_training_mode_from_the_start() -> None:
    assert [name for name in OPTIMIZERS if has_modes(built(name, network()))] == [
        "schedulefree"
    ]
    assert built("schedulefree", network()).param_groups[0]["train_mode"]


def test_the_help_of_the_flag_has_every_name() -> None:
    (flag,) = (one for one in flags(OptimizerOptions) if one.name == "optimizer")
    assert set(re.findall(r"\w+", flag.help)) >= set(OPTIMIZERS)


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys, dstrain.training.optimizers.names; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_path_with_a_name_has_its_learning_rate_and_the_defaults_of_the_class() -> (
    None
):
    by_path: Any = named("prodigyopt.Prodigy")
    assert (by_path.learning_rate, by_path.install) == (1.0, "prodigyopt")
    assert named("torch.optim.AdamW").arguments == {}
    assert named("torch.optim.SGD").learning_rate == 1e-4
