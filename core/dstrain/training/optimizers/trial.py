"""Try an optimizer on a tiny matrix before anything is loaded."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dstrain.errors import UsageError
from dstrain.training.optimizers.arguments import FLAG
from dstrain.training.optimizers.rounding import StochasticRounding, stand_in

ESTIMATE = "d"
"""Entry of a group: the estimate from all gradients by which Prodigy, D-Adaptation and
the like multiply the learning rate."""
SIDE = 64
"""8-bit optimizers keep what has fewer than 4096 numbers in 32 bits."""


def try_optimizer(
    flag: str,
    name: str,
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    factors: Sequence[float] = (1.0,),
) -> dict[str, Any]:
    """Make a step on a matrix for each learning rate, as `factors` of the one given;
    return the `state_dict()` of the optimizer after it.

    Raises UsageError, naming the flag and the optimizer, for one that cannot make a
    step.
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
    return optimizer.state_dict()


def steps_apart(kind: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether steps with one parameter at a time are those with all together."""
    generator = torch.Generator().manual_seed(0)
    # Rows of different sizes, which means and norms would mix.
    sizes = torch.logspace(-2, 2, 2 * SIDE).view(2, SIDE, 1)
    gradients = torch.randn(8, 2, SIDE, SIDE, generator=generator) * sizes
    found = []
    for one_by_one in (False, True):
        # From 0, so that what they become is how far they moved.
        parameters = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(2)]
        own = [stand_in(one) for one in parameters] if one_by_one else parameters
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            optimizer = construct(kind, own, arguments)
            enter_training(optimizer)
            pairs = dict(zip(own, parameters, strict=True))
            wrapped = StochasticRounding(optimizer, pairs, exact=True)
            step: Callable[[], Any] = wrapped.step if one_by_one else optimizer.step
            for of_step in gradients:
                for parameter, gradient in zip(parameters, of_step, strict=True):
                    parameter.grad = gradient.clone()
                step()
        if ESTIMATE in optimizer.param_groups[0]:
            # Begins so small that these steps may not show it.
            return False
        found.append(torch.cat([one.detach() for one in parameters]))
    together, apart = found
    # What is computed for several at once may be rounded in another order.
    return torch.allclose(together, apart, 1e-4, 1e-4 * float(together.std()))


def construct(
    kind: Callable[..., Optimizer], parameters: Any, arguments: Mapping[str, Any]
) -> Optimizer:
    """Call an optimizer with parameters, or groups of these, and arguments; what it
    prints does not go where results of commands belong.
    """
    with redirect_stdout(StringIO()):
        return kind(parameters, **arguments)


def enter_training(optimizer: Optimizer) -> None:
    """Switch an optimizer that has modes, as schedule-free ones have, to training."""
    switch = getattr(optimizer, "train", None)
    if callable(switch):
        switch()
