"""Try an optimizer on a tiny matrix before anything is loaded."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dstrain.errors import UsageError
from dstrain.training.optimizers.arguments import FLAG

SIDE = 64
"""8-bit optimizers keep what has fewer than 4096 numbers in 32 bits."""


@dataclass(frozen=True)
class Trial:
    """What was seen of an optimizer."""

    state: Mapping[str, Any]
    """Its `state_dict()` after a step."""
    takes_vectors: bool
    """Whether it optimizes other tensors than matrices."""
    takes_rates: bool
    """Whether its parameters can have different learning rates."""


def try_optimizer(
    flag: str,
    name: str,
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Trial:
    """Make a step on a matrix, and one on a vector.

    Raises UsageError for an optimizer that cannot make one, naming the argument that it
    is due to.

    Args:
        flag: The flag that names the optimizer.
        name: The optimizer as it was asked for.
        kind: The optimizer.
        arguments: All that it is called with.
        given: Those of --optimizer_args.
    """
    optimizer = _after_a_step(kind, arguments, (SIDE, SIDE))
    if optimizer is None:
        for one in given:
            others = {key: value for key, value in arguments.items() if key != one}
            if _after_a_step(kind, others, (SIDE, SIDE)) is not None:
                what = f"{name} does not work with {one}={given[one]!r}"
                raise UsageError(FLAG, what)
        if given and _after_a_step(kind, _without(arguments, given), (SIDE, SIDE)):
            words = " ".join(f"{one}={value!r}" for one, value in given.items())
            raise UsageError(FLAG, f"{name} does not work with {words} together")
        what = f"{name} makes no step from gradients alone, so that it cannot be used"
        raise UsageError(flag, what)
    takes_vectors = _after_a_step(kind, arguments, (SIDE,)) is not None
    rates = (1.0, 0.5)
    takes_rates = _after_a_step(kind, arguments, (SIDE, SIDE), rates) is not None
    return Trial(optimizer.state_dict(), takes_vectors, takes_rates)


def _without(arguments: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _after_a_step(
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    shape: Sequence[int],
    factors: Sequence[float] = (),
) -> Optimizer | None:
    """Return an optimizer after one step; None if it fails, whatever it raises.

    Args:
        kind: The optimizer.
        arguments: All that it is called with.
        shape: That of the parameters.
        factors: Learning rates of several groups, in terms of the one given.
    """
    parameters = [nn.Parameter(torch.ones(*shape)) for _ in factors or (1.0,)]
    for parameter in parameters:
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(*shape)
    groups: Any = [
        {"params": [parameter], "lr": arguments["lr"] * factor}
        for parameter, factor in zip(parameters, factors, strict=False)
    ]
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        # What is done with an optimizer in a trial is no reason to warn of it.
        warnings.simplefilter("ignore")
        try:
            optimizer = kind(groups or parameters, **arguments)
            enter_training(optimizer)
            optimizer.step()
        except Exception:
            return None
    is_finite = all(bool(torch.isfinite(one).all()) for one in parameters)
    return optimizer if is_finite else None


def enter_training(optimizer: Optimizer) -> None:
    """Switch an optimizer that has modes, as schedule-free ones have, to training."""
    switch = getattr(optimizer, "train", None)
    if callable(switch):
        switch()
