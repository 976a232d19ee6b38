"""Gradient checkpointing: recompute activations in the backward pass to save memory."""

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from dstrain.errors import UsageError

Parameters = ParamSpec("Parameters")
T = TypeVar("T")


def gradient_checkpoint_forward(
    function: Callable[Parameters, T],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> T:
    """Call a block with or without checkpointing; for authors of networks.

    Offloading implies checkpointing.
    """
    if use_gradient_checkpointing_offload:
        return cast(T, checkpoint_in_ram(function, *args, **kwargs))
    if use_gradient_checkpointing:
        named: dict[str, Any] = dict(kwargs)
        made = checkpoint(function, *args, use_reentrant=False, **named)
        return cast(T, made)
    return function(*args, **kwargs)


def checkpoint_in_ram(
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint a block and keep its inputs in RAM until the backward pass."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def enable_checkpointing(
    name: str,
    module: nn.Module,
    offload: bool,
) -> None:
    """Enable checkpointing in a network of diffusers or transformers.

    Raises UsageError if the network does not support it.
    """
    block = checkpoint_in_ram if offload else partial(checkpoint, use_reentrant=False)
    checkpoint_through(name, module, block)


def checkpoint_through(
    name: str,
    module: nn.Module,
    block: Callable[..., Any],
) -> None:
    """Let a network call its blocks through a function: block(function, *arguments).

    Raises UsageError if the network does not support it.
    """
    try:
        if hasattr(module, "enable_gradient_checkpointing"):  # of diffusers
            enable_blocks: Any = module.enable_gradient_checkpointing
            enable_blocks(block)
            return
        method = "activation_checkpointing_enable"
        if not hasattr(module, method):  # transformers before it was renamed
            method = "gradient_checkpointing_enable"
        enable: Any = getattr(module, method)
        enable({"use_reentrant": False})
    except (AttributeError, ValueError) as error:
        raise UsageError(
            "--use_gradient_checkpointing",
            f"{name} ({type(module).__name__}) does not support it: {error}",
        ) from error
    for layer in module.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = block  # type: ignore[assignment]  # mypy takes it for a module
