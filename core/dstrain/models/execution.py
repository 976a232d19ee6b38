"""How a network runs: the blocks that it repeats, calls around them, gradient
checkpointing, and layers that a keeper stores in another form.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from dstrain.errors import UsageError

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
CHECKPOINT = "_gradient_checkpointing_func"
"""What a network of diffusers calls its blocks through while it is checkpointed."""

BlockCall = Callable[..., Any]
"""(name of the block, the block, *its arguments) -> what the block returns."""


def repeated_blocks(network: nn.Module) -> Mapping[str, nn.Module]:
    """Return the blocks that a network repeats, by name, in the order of their
    definition, which is the one in which they are called; none inside another.

    A network of diffusers names their classes in `_repeated_blocks`. In others they are
    the modules of each `nn.ModuleList` with two or more modules, all of one class.
    """
    classes = getattr(network, "_repeated_blocks", None) or ()
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if classes:
            if type(module).__name__ in classes:
                found[name] = module
        elif isinstance(module, nn.ModuleList):
            kinds = {type(one) for one in module}
            if len(module) > 1 and len(kinds) == 1:
                found |= {f"{name}.{key}": one for key, one in module.named_children()}
    return {name: one for name, one in found.items() if list(one.parameters())}


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
        is_checkpointed = getattr(network, "gradient_checkpointing", False)
        if is_checkpointed and torch.is_grad_enabled():
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
        return cast(T, checkpoint(function, *args, use_reentrant=False, **named))
    return function(*args, **kwargs)


def checkpoint_in_ram(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block and keep its inputs in RAM until the backward pass."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def enable_checkpointing(name: str, module: nn.Module, offload: bool) -> None:
    """Enable checkpointing in a network of diffusers or transformers.

    Raises UsageError if the network does not support it.
    """
    block = checkpoint_in_ram if offload else partial(checkpoint, use_reentrant=False)
    checkpoint_through(name, module, block)


def checkpoint_through(name: str, module: nn.Module, block: Callable[..., Any]) -> None:
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
        what = f"{name} ({type(module).__name__}) does not support it: {error}"
        raise UsageError("--use_gradient_checkpointing", what) from error
    for layer in module.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = block  # type: ignore[assignment]  # mypy takes it for a module


class StoredLinear(nn.Linear):
    """A linear layer that restores its weight for each product; keepers make layers of it.

    `weight` is what it stores. LoRA is trained beside it, and nothing is merged into it.
    """

    def restored(self) -> Tensor:
        """Return the weight (out, in) that the layer computes with, detached."""
        raise NotImplementedError
