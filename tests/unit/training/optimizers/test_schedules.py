"""Learning rate schedules are those of transformers, or of their papers."""

from typing import Any

import pytest
import torch
from dstrain.config.options import OptimizerOptions
from dstrain.training.optimizers import build_lr_scheduler
from torch import nn
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


def rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer(rate: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], rate)


def settings(name: str, **changes: Any) -> OptimizerOptions:
    return OptimizerOptions(lr_scheduler=name, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "ours", "theirs"), SCHEDULES)
@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 10), (3, 10), (10, 10), (12, 10), (0, 1)]
)
def test_every_learning_rate_is_that_of_transformers(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], warmup: int, steps: int
) -> None:
    if name == "polynomial" and warmup >= steps:
        warmup = steps - 1  # transformers divides by 0
    config = settings(name, lr_warmup_steps=warmup, **ours)
    own = build_lr_scheduler(config, optimizer(), steps)
    other = get_scheduler(
        name, optimizer(), warmup, steps, scheduler_specific_kwargs=theirs
    )
    assert rates(own, steps + 5) == rates(other, steps + 5)


@pytest.mark.parametrize(("name", "ours", "theirs"), SCHEDULES)
def test_a_schedule_continues_from_the_state_that_transformers_saved(
    name: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    other = get_scheduler(name, optimizer(), 2, 10, scheduler_specific_kwargs=theirs)
    rates(other, 4)
    config = settings(name, lr_warmup_steps=2, **ours)
    own = build_lr_scheduler(config, optimizer(), 10)
    own.load_state_dict(other.state_dict())
    assert own.last_epoch == other.last_epoch
    own.optimizer.step()
    own.step()
    other.step()
    assert own.get_last_lr() == other.get_last_lr()


def test_rex_falls_slowly_at_first_and_ends_at_zero() -> None:
    found = rates(build_lr_scheduler(settings("rex"), optimizer(1.0), 4), 6)
    # (1 - z) / (1/2 + (1 - z)/2) of z = 0, 1/4, 1/2, 3/4 and from 1 on.
    assert found == pytest.approx([1.0, 6 / 7, 2 / 3, 2 / 5, 0.0, 0.0])
    late = rates(
        build_lr_scheduler(settings("rex", lr_warmup_steps=2), optimizer(1.0), 6), 3
    )
    assert late == [0.0, 0.5, 1.0]


def test_each_group_keeps_its_ratio() -> None:
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1e-2, 1e-3)
    ]
    both = torch.optim.AdamW(groups, 1.0)
    scheduler = build_lr_scheduler(settings("cosine"), both, 8)
    for _ in range(7):
        first, second = scheduler.get_last_lr()
        assert first == pytest.approx(10 * second)
        both.step()
        scheduler.step()
