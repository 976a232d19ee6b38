"""Learning rate schedules."""

import math
from collections.abc import Callable
from pkgutil import resolve_name

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dstrain.config.options import POLYNOMIAL_END, OptimizerOptions
from dstrain.errors import UsageError
from dstrain.installed import described

Schedule = Callable[[int, int, int], float]
"""(step from 0, all steps, steps of the warm-up) -> the factor of all learning rates."""


def schedule_at(path: str) -> Schedule:
    """Return the schedule of a dotted path; raises UsageError naming what is wrong."""
    flag = "--lr_scheduler"
    try:
        found = resolve_name(path)
    except Exception as error:
        raise UsageError(flag, f"{path} is not there: {described(error)}") from error
    if not callable(found):
        raise UsageError(flag, f"{path} is no function")
    schedule: Schedule = found
    return schedule


def build_lr_scheduler(
    options: OptimizerOptions, optimizer: Optimizer, total_steps: int
) -> LambdaLR:
    """Build the schedule of --lr_scheduler, which multiplies every learning rate: by
    `transformers.get_scheduler`, by a path, or `rex` (Chen et al. 2021, "REX:
    revisiting budgeted training with an improved schedule").
    """
    schedule = options.lr_scheduler
    warmup_steps = options.lr_warmup_steps
    cycles = options.lr_scheduler_num_cycles or 1
    power = options.lr_scheduler_power or 1.0
    first = optimizer.param_groups[0]["lr"]

    own = schedule_at(schedule) if "." in schedule else None

    def factor(step: int) -> float:
        if own is not None:
            return float(own(step, total_steps, warmup_steps))
        if schedule == "constant":
            return 1.0
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        if schedule == "constant_with_warmup":
            return 1.0
        decay_steps = max(1, total_steps - warmup_steps)
        if schedule == "linear":
            return max(0.0, (total_steps - step) / decay_steps)
        if schedule == "polynomial":
            if step > total_steps:
                return float(POLYNOMIAL_END / first)
            # As in transformers, where a run without decay has no step left.
            remaining = 1 - (step - warmup_steps) / decay_steps
            rate = (first - POLYNOMIAL_END) * remaining**power + POLYNOMIAL_END
            return float(rate / first)
        progress = (step - warmup_steps) / decay_steps
        if schedule == "cosine_with_restarts":
            if progress >= 1.0:
                return 0.0
            within = (cycles * progress) % 1.0
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * within)))
        if schedule == "rex":
            left = max(0.0, 1.0 - progress)
            return left / (0.5 + 0.5 * left)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

    return LambdaLR(optimizer, factor)
