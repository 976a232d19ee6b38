"""Numbers that a denoiser would round before it embeds them, such as timesteps, handed to it exactly."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def exact_arguments(module: nn.Module, *exact: Tensor) -> Iterator[None]:
    """While this lasts, `exact` takes the place of the first positional arguments that the module is called with.

    For the module that embeds timesteps: diffusers' transformers round them, (batch,) fp32, to the dtype of the hidden
    states before they call it, and in bf16 500 and 501 are then one.
    """
    handle = module.register_forward_pre_hook(lambda _, arguments: (*exact, *arguments[len(exact) :]))
    try:
        yield
    finally:
        handle.remove()
