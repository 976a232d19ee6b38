"""Try an optimizer on a tiny matrix before anything is loaded."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
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


def try_optimizer(
    flag: str,
    name: str,
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    factors: Sequence[float] = (1.0,),
) -> dict[str, Any]:
    """Make a step on a matrix for each learning rate, in terms of the one given; return
    the `state_dict()` of the optimizer after it.

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
    return optimizer.state_dict()


def steps_apart(kind: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether steps with one parameter at a time are those with all together."""
    sizes = (SIDE, SIDE)
    gradients = _gradients(sum(sizes))
    together = _moved(kind, arguments, sizes, gradients)
    return _agree(together, _moved(kind, arguments, sizes, gradients, True))


def steps_by_rows(kind: Callable[..., Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether steps with some rows of a parameter are those with the whole."""
    gradients = _gradients(SIDE)
    # Not halves, whose ends are also those of an 8-bit optimizer's blocks.
    cut = SIDE // 2 + 1
    try:
        whole = _moved(kind, arguments, (SIDE,), gradients)
        upper = _moved(kind, arguments, (cut,), gradients[:, :cut])
        lower = _moved(kind, arguments, (SIDE - cut,), gradients[:, cut:])
    except Exception:
        return False
    return _agree(whole, torch.cat([upper, lower]))


def _gradients(rows: int) -> Tensor:
    """Return the gradients of eight steps, (8, rows, SIDE): rows of different sizes, which
    means and norms would mix.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, 2, rows)[:, None]
    return torch.randn(8, rows, SIDE, generator=generator) * sizes


def _moved(
    kind: Callable[..., Optimizer],
    arguments: Mapping[str, Any],
    sizes: Sequence[int],
    gradients: Tensor,
    one_by_one: bool = False,
) -> Tensor:
    """Return how far parameters with these rows move; no number where the optimizer has an
    estimate from all of them, which begins so small that these steps may not show it.
    """
    # From 0, so that what they become is how far they moved.
    parameters = [nn.Parameter(torch.zeros(size, SIDE)) for size in sizes]
    own = [stand_in(one) for one in parameters] if one_by_one else parameters
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        optimizer = construct(kind, own, arguments)
        enter_training(optimizer)
        pairs = dict(zip(own, parameters, strict=True))
        wrapped = StochasticRounding(optimizer, pairs, exact=True)
        step: Callable[[], Any] = wrapped.step if one_by_one else optimizer.step
        for gradient in gradients:
            for parameter, part in zip(
                parameters, gradient.split([*sizes]), strict=True
            ):
                parameter.grad = part.clone()
            step()
    moved = torch.cat([parameter.detach() for parameter in parameters])
    return moved * math.nan if ESTIMATE in optimizer.param_groups[0] else moved


def _agree(one: Tensor, other: Tensor) -> bool:
    # What is computed for several at once may be rounded in another order.
    return bool(((one - other).abs() <= 1e-4 * (other.abs() + one.std())).all())


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
