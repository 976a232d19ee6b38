"""Let an adapter act inside a denoiser: a function of its own is called in place of each
block that the denoiser repeats.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dstrain.models.execution.blocks import repeated_blocks

CHECKPOINT = "_gradient_checkpointing_func"
"""What a network of diffusers calls its blocks through while it is checkpointed."""

BlockCall = Callable[..., Any]
"""(name of the block, the block, *its arguments) -> what the block returns."""


@contextmanager
def around_blocks(network: nn.Module, call: BlockCall) -> Iterator[None]:
    """Let a network of diffusers call `call(name, block, *arguments)` in place of each block
    that it repeats, within the context and where the block is recomputed later.

    `call` computes the block as `block(*arguments)`. Tensors that it uses besides get
    gradients, and what it computes of them is recomputed with the block.

    Args:
        network: The denoiser.
        call: Gets the block's name in the network, such as "transformer_blocks.3". The
            arguments are those of the network's own call: in their order where the
            block is checkpointed, by name otherwise (`inspect.signature` tells which).
    """
    blocks = repeated_blocks(network)
    with ExitStack() as stack:
        if getattr(network, "gradient_checkpointing", False) and (
            torch.is_grad_enabled()
        ):
            # A forward that is replaced only within the context would be the block's
            # own again when the backward pass recomputes it.
            names = {id(block): name for name, block in blocks.items()}
            checkpoint = getattr(network, CHECKPOINT)

            def through(block: nn.Module, *arguments: Any, **named: Any) -> Any:
                name = names.get(id(block))
                inner = block if name is None else partial(call, name, block)
                return checkpoint(inner, *arguments, **named)

            stack.enter_context(_replaced(network, CHECKPOINT, through))
        else:
            for name, block in blocks.items():
                # The block's own forward, so that its hooks are called once.
                inner = partial(call, name, block.forward)
                stack.enter_context(_replaced(block, "forward", inner))
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give a module another attribute meanwhile; one of its class shows again later."""
    own = vars(module)
    before = own.get(name)
    had = name in own
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]
