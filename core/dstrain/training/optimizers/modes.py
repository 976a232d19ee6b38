"""Use the weights that an optimizer averages, where it has modes for that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


def has_modes(optimizer: Optimizer | Callable[..., Optimizer]) -> bool:
    """Return whether an optimizer trains other weights than those to be used, as
    schedule-free ones do.
    """
    return callable(getattr(optimizer, "eval", None))


@contextmanager
def in_eval_mode(optimizer: Optimizer) -> Iterator[None]:
    """Put the averaged weights in place of those in training, which come back bit for
    bit.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    # The two modes are computed from each other, which rounds: a save would change what
    # is trained after it.
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
