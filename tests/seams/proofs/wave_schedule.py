"""A learning rate schedule, named by its path: a wave with three crests."""

import math


def wave(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rates at a step, from 0 to 1."""
    if step < warmup_steps:
        return step / warmup_steps
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 + 0.5 * math.cos(6 * math.pi * share)
