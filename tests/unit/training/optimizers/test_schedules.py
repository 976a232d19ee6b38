"""Learning rate schedules are those of transformers, or of their papers."""

from typing import Any

import pytest
import torch
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import build_lr_scheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

SCHEDULES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("constant", {}, {}),
    ("constant_with_warmup", {}, {}),
    ("linear", {}, {}),
    ("cosine", {}, {}),
    ("polynomial", {}, {}),
    ("polynomial", {"lr_scheduler_power": 2.0}, {"power": 2.0}),
    ("cosine_with_restarts", {}, {}),
    ("cosine_with_restarts", {"lr_scheduler_num_cycles": 3}, {"num_cycles": 3}),
)
"""Name, our settings and those of transformers."""


def optimizer(*rates: float) -> torch.optim.AdamW:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": one} for one in rates]
    return torch.optim.AdamW(groups, rates[0])


def ours(name: str, steps: int, *rates: float, **settings: Any) -> LRScheduler:
    options = OptimizerOptions(lr_scheduler=name, **settings)  # type: ignore[arg-type]  # of any option
    return build_lr_scheduler(options, optimizer(*rates), steps)


def rates(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """Those of each group, for so many steps."""
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("name", "own", "theirs"), SCHEDULES)
@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 10), (3, 10), (10, 10), (12, 10), (0, 1)]
)
def test_every_learning_rate_is_that_of_transformers(
    name: str, own: dict[str, Any], theirs: dict[str, Any], warmup: int, steps: int
) -> None:
    """Also after a state of theirs is loaded."""
    if name == "polynomial" and warmup >= steps:
        warmup = steps - 1  # transformers divides by 0

    def other() -> LRScheduler:
        given = {"scheduler_specific_kwargs": theirs}
        return get_scheduler(name, optimizer(1e-3), warmup, steps, **given)

    own = {"lr_warmup_steps": warmup, **own}
    wanted = rates(other(), steps + 5)
    assert rates(ours(name, steps, 1e-3, **own), steps + 5) == wanted
    before = other()
    rates(before, 4)
    resumed = ours(name, steps, 1e-3, **own)
    resumed.load_state_dict(before.state_dict())
    rates(resumed, 1)
    assert resumed.get_last_lr() == wanted[5]


def test_rex_falls_slowly_at_first_and_ends_at_zero() -> None:
    """(1 - z) / (1/2 + (1 - z)/2) of z = 0, 1/4, 1/2, 3/4 and from 1 on."""
    found = [rate for (rate,) in rates(ours("rex", 4, 1.0), 6)]
    assert found == pytest.approx([1.0, 6 / 7, 2 / 3, 2 / 5, 0.0, 0.0])
    late = rates(ours("rex", 6, 1.0, lr_warmup_steps=2), 3)
    assert late == [[0.0], [0.5], [1.0]]
