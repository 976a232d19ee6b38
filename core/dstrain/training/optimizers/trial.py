"""Try an optimizer on a tiny matrix before anything is loaded."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dstrain.errors import UsageError
from dstrain.training.optimizers.arguments import FLAG
from dstrain.training.optimizers.rounding import StochasticRounding, stand_in

ESTIMATE = "d"
"""Entry of a group: the estimate from all gradients by which Prodigy, D-Adaptation and
the like multiply the learning rate."""
SIDE = 64
"""8-bit optimizers keep what has fewer than 4096 numbers in 32 bits."""


@dataclass(frozen=True)
class Trial:
    """What was seen of an optimizer."""

    state: Mapping[str, Any]
    """Its `state_dict()` after a step."""


def try_optimizer(
    flag: str,
    name: str,
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    factors: Sequence[float] = (1.0,),
) -> Trial:
    """Make a step on a matrix for each learning rate, in terms of the one given.

    Raises UsageError for an optimizer that cannot make one.

    Args:
        flag: The flag that errors name.
        name: The optimizer as it was asked for.
        kind: The optimizer.
        arguments: All that it is called with.
        factors: Learning rates of several groups, in terms of the one given.
    """
    parameters = [nn.Parameter(torch.ones(SIDE, SIDE)) for _ in factors]
    for parameter in parameters:
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(SIDE, SIDE)
    groups: Any = [
        {"params": [parameter], "lr": arguments["lr"] * factor}
        for parameter, factor in zip(parameters, factors, strict=True)
    ]
    words = " ".join(f"{one}={value!r}" for one, value in arguments.items())
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        # What is done with an optimizer in a trial is no reason to warn of it.
        warnings.simplefilter("ignore")
        try:
            several = len(factors) > 1
            optimizer = construct(kind, groups if several else parameters, arguments)
            enter_training(optimizer)
            optimizer.step()
        except Exception as error:
            what = f"{name} makes no step with {words}: {error!r}"
            advice = f"its arguments are given with {FLAG}"
            raise UsageError(flag, what, advice) from error
    if not all(bool(torch.isfinite(one).all()) for one in parameters):
        raise UsageError(flag, f"{name} makes steps that are not finite with {words}")
    return Trial(optimizer.state_dict())


def steps_apart(kind: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether steps with one parameter at a time are those with all together."""
    found = []
    counted = []
    for apart in (False, True):
        generator = torch.Generator().manual_seed(0)
        # From 0, so that what they become is how far they moved.
        parameters = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(2)]
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            own = [stand_in(one) for one in parameters] if apart else parameters
            optimizer = construct(kind, own, arguments)
            pairs = dict(zip(own, parameters, strict=True))
            wrapped = StochasticRounding(optimizer, pairs, exact=True)
            for _ in range(8):
                for number, parameter in enumerate(parameters):
                    size = 10.0**-number
                    gradient = torch.randn(SIDE, SIDE, generator=generator)
                    parameter.grad = size * (gradient + 1)
                step: Callable[[], Any] = wrapped.step if apart else optimizer.step
                step()
        if ESTIMATE in optimizer.param_groups[0]:
            # Begins so small that these steps may not show it.
            return False
        found.append([one.detach() for one in parameters])
        counted.append(_numbers(optimizer))
    # What is computed for several at once may be rounded in another order.
    return _are_close(*counted) and all(
        bool((one - other).abs().max() <= 1e-3 * one.abs().max())
        for one, other in zip(*found, strict=True)
    )


def _numbers(optimizer: Optimizer) -> Tensor:
    """Return the numbers of an optimizer's group: an estimate from all parameters shows
    there before it shows in these.
    """
    values = optimizer.param_groups[0].values()
    numbers = [value for value in values if isinstance(value, int | float)]
    return torch.tensor(numbers, dtype=torch.float64)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=0, equal_nan=True)


def steps_by_rows(kind: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether steps with some rows of a parameter are those with the whole."""
    found = []
    counted = []
    # Not halves, whose ends are also those of an 8-bit optimizer's blocks.
    for parts in ((SIDE,), (SIDE // 2 + 1, SIDE // 2 - 1)):
        rows = []
        for number, count in enumerate(parts):
            first = sum(parts[:number])
            # From 0, so that what they become is how far they moved.
            parameter = nn.Parameter(torch.zeros(count, SIDE))
            generator = torch.Generator().manual_seed(0)
            with warnings.catch_warnings(), torch.random.fork_rng([]):
                warnings.simplefilter("ignore")
                try:
                    optimizer = construct(kind, [parameter], arguments)
                    enter_training(optimizer)
                    for _ in range(8):
                        gradient = torch.randn(SIDE, SIDE, generator=generator)
                        # Rows of different sizes, which means and norms would mix.
                        gradient *= torch.logspace(-2, 2, SIDE)[:, None]
                        parameter.grad = gradient[first : first + count].clone()
                        optimizer.step()
                except Exception:
                    return False
            rows.append(parameter.detach())
            counted.append(_numbers(optimizer))
        found.append(torch.cat(rows))
    whole, divided = found
    is_close = torch.allclose(whole, divided, 1e-4, 1e-4 * float(whole.std()))
    return is_close and all(_are_close(counted[0], one) for one in counted)


def construct(
    kind: Callable[..., Optimizer], parameters: Any, arguments: Mapping[str, Any]
) -> Optimizer:
    """Call an optimizer with parameters, or groups of these, and arguments.

    Some print what they were called with, where results of commands belong.
    """
    with redirect_stdout(StringIO()):
        return kind(parameters, **arguments)


def enter_training(optimizer: Optimizer) -> None:
    """Switch an optimizer that has modes, as schedule-free ones have, to training."""
    switch = getattr(optimizer, "train", None)
    if callable(switch):
        switch()
