"""Compile the blocks that a network repeats: once for all of them, in seconds, where a
whole network would take minutes.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from dstrain.plugin import Identity, Keeper, KeeperRequest, UsageError
from dstrain.plugin.functional import repeated_blocks
from torch import nn

from dstrain_memory.options import MemoryOptions

FLAG = "--compile"
NO_NAMES: Mapping[str, Collection[str]] = MappingProxyType({})
INDUCTOR = "inductor"
BACKEND = INDUCTOR
"""What generates the code: torch's default."""
CXX = MappingProxyType({"darwin": "clang++", "win32": "cl"})
"""Platform -> the compiler that torch looks for on it, where that is not g++."""
RECOMPILATIONS = 64
"""Blocks of one class share this many versions, for sizes of samples, for training and for
previews; beyond them torch would silently compile no more. Its own limit is 8."""


OWN_WARNINGS = (
    (r"The \.grad attribute of a Tensor", UserWarning),
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    # Some networks rotate queries and keys with them.
    (r"Torchinductor does not support code generation for complex", UserWarning),
    # Of an autograd.Function with its own backward pass, as stored weights have.
    (r".* should not be instantiated", DeprecationWarning),
)
"""What torch says of itself while it compiles."""


def compiling(request: KeeperRequest, options: MemoryOptions) -> list[Keeper]:
    """Return the keeper that --compile asks for, if it is given."""
    return [Compile(request.trained)] if options.compile else []


@dataclass(eq=False)
class Compile(Keeper):
    """Compiles the blocks of networks in training."""

    components: Collection[str]

    def __post_init__(self) -> None:
        self.kind = "compile"
        self.flag = FLAG
        self.unshardable = (
            "sharding puts other weights in the place of those that were compiled with"
        )

    def identity(self, component: str, config: Mapping[str, Any] | None) -> Identity:
        """Return that steps are compiled; cached values are not."""
        return Identity("compile", True)

    def check(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Raise what `compile_blocks` raises."""
        compile_blocks(networks, device, check_only=True)

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Compile the blocks of networks that have their LoRA layers."""
        compile_blocks(networks, device)


def compile_blocks(
    networks: Mapping[str, nn.Module], device: torch.device, check_only: bool = False
) -> None:
    """Compile the blocks of networks where they are: names of weights stay the same, and
    hooks of blocks, such as those of block swap, are not compiled.

    Raises UsageError if none of them repeats blocks, or without a compiler.

    Args:
        networks: The networks by component. They have their LoRA layers already.
        device: What they compute on.
        check_only: Compile nothing, as for networks without memory.
    """
    blocks = {
        f"{component}.{name}": block
        for component, network in networks.items()
        for name, block in repeated_blocks(network).items()
    }
    if not blocks:
        what = f"has no effect: {', '.join(networks)} repeats no blocks"
        raise UsageError(FLAG, what)
    if BACKEND == INDUCTOR:
        _check_compiler(device)
    if check_only:
        return
    import torch._dynamo

    limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    torch._dynamo.config.recompile_limit = limit
    for foreign, kind in OWN_WARNINGS:
        warnings.filterwarnings("ignore", foreign, kind)
    for name, block in blocks.items():
        block.forward = _compiled(name, block)


def _check_compiler(device: torch.device) -> None:
    """Raise UsageError if there is nothing that compiles the code which torch generates;
    it looks for the same itself, in the middle of the first step.
    """
    variable, names = "CXX", [CXX.get(sys.platform, "g++")]
    if device.type == "cuda":
        if find_spec("triton") is None:
            what = "needs triton on a GPU, which is not installed"
            raise UsageError(FLAG, what, "pip install triton, or train without it")
        variable, names = "CC", ["gcc", "clang"]
    own = os.environ.get(variable)
    if own is not None:
        names = [own]
    if not any(map(shutil.which, names)):
        raise UsageError(
            FLAG,
            f"needs a C++ compiler, and {' or '.join(names)} is not found",
            f"install one, or set the variable {variable} to the path of yours",
        )


def _compiled(name: str, block: nn.Module) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException

    plain = block.forward
    compiled = torch.compile(plain, backend=BACKEND)

    @wraps(plain)
    def forward(*inputs: Any, **named: Any) -> Any:
        try:
            return compiled(*inputs, **named)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = str(cause).strip().partition("\n")[0]
            raise UsageError(
                FLAG,
                f"{name} ({type(block).__name__}) cannot be compiled here: {reason}",
                "train without it",
            ) from error

    return forward
