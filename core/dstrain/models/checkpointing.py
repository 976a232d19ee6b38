"""Gradient checkpointing: activations recomputed in the backward pass, or kept in RAM,
to save memory of the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from dstrain.errors import UsageError


def gradient_checkpoint_forward(
    function: Callable[..., Any],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Call a block with or without checkpointing; for authors of networks. Offload
    alone implies checkpointing.
    """
    if use_gradient_checkpointing_offload:
        return checkpoint_in_ram(function, *arguments, **named)
    if use_gradient_checkpointing:
        return checkpoint(function, *arguments, use_reentrant=False, **named)
    return function(*arguments, **named)


def checkpoint_in_ram(
    function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Checkpoint a block and keep its saved inputs in RAM until the backward pass."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *arguments, use_reentrant=False, **named)


def enable_checkpointing(name: str, module: nn.Module, offload: bool) -> None:
    """Switch checkpointing on in a network of diffusers or transformers; raises
    UsageError if it has none.
    """
    block = checkpoint_in_ram if offload else partial(checkpoint, use_reentrant=False)
    try:
        if hasattr(module, "enable_gradient_checkpointing"):
            enable_blocks: Any = module.enable_gradient_checkpointing
            enable_blocks(block)
        else:
            named = "activation_checkpointing_enable"  # older transformers have the other name only
            enable: Any = getattr(
                module,
                named if hasattr(module, named) else "gradient_checkpointing_enable",
            )
            enable({"use_reentrant": False})
            for layer in module.modules():
                if hasattr(layer, "_gradient_checkpointing_func"):
                    # mypy takes every attribute of a module for a tensor or a module.
                    layer._gradient_checkpointing_func = block  # type: ignore[assignment]
    except (AttributeError, ValueError) as error:
        raise UsageError(
            "--use_gradient_checkpointing",
            f"{name} ({type(module).__name__}) does not support it: {error}",
        ) from error
