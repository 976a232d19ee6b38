"""Keep weights in RAM as --blocks_to_swap, --enable_model_cpu_offload and
--offload_models ask.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from dstrain.plugin import (
    Keeper,
    KeeperRequest,
    KeptBytes,
    UsageError,
    WeightSize,
    get_logger,
    split_commas,
)
from dstrain.plugin.functional import repeated_blocks
from torch import Tensor, nn

from dstrain_memory.block_swap import (
    ALL_BLOCKS,
    FLAG,
    BlockSwap,
    last_blocks,
    swapped_blocks,
)
from dstrain_memory.options import MemoryOptions
from dstrain_memory.ram import ComponentInRam, stored_tensors

logger = get_logger("dstrain.memory")
OFFLOAD_FLAG = "--offload_models"
NO_NAMES: Mapping[str, Collection[str]] = MappingProxyType({})


def moving(request: KeeperRequest, options: MemoryOptions) -> list[Keeper]:
    """Return the keepers that the flags ask for.

    Raises UsageError for block swap of what is trained in full, and for a component of
    --offload_models that no unit or decoder uses, in any stage or preview.
    """
    keepers: list[Keeper] = []
    flag = options.swap_flag
    if flag:
        for name in request.full:
            raise UsageError(
                flag,
                f"is for weights that do not change, but --trainable_models trains all of {name}",
                "train LoRA in place of it, or leave the flag out",
            )
        count = options.blocks_to_swap or ALL_BLOCKS
        networks = tuple(request.lora)
        if request.stage == "generate":
            networks = tuple(one for one in request.denoisers if one in request.loaded)
        keepers.append(Swap(networks, flag, count, _recomputes(request)))
    offloaded = dict.fromkeys(
        name
        for what in split_commas(options.offload_models)
        for name in request.named(OFFLOAD_FLAG, what)
    )
    here = tuple(name for name in offloaded if _is_offloaded(name, request))
    if here:
        keepers.append(Offload(here, tuple(offloaded)))
    return keepers


def _is_offloaded(name: str, request: KeeperRequest) -> bool:
    """Return whether a component can be offloaded: none that this stage does not load."""
    why = ""
    if name not in request.loaded:
        why = f"{name} is not loaded"
    elif name in request.trained:
        # Stage 1 does not load it, and DiffSynth-Studio's commands of stage 1 name it.
        if request.stage == "data_process":
            return False
        why = f"{name} is trained; its blocks can be swapped with {FLAG}"
    elif name not in request.used:
        why = f"no unit or decoder uses {name}, but every step"
    if why:
        word = "it" if request.stage == "generate" else "this run"
        advice = f"{word} loads {', '.join(request.loaded)}"
        raise UsageError(OFFLOAD_FLAG, f"has no effect: {why}", advice)
    return True


def _recomputes(request: KeeperRequest) -> bool:
    """Return whether a command asks for gradient checkpointing, or needs none."""
    options = request.options
    return request.stage == "generate" or bool(
        options.use_gradient_checkpointing or options.use_gradient_checkpointing_offload
    )


class InRam(Keeper):
    """Keeps weights in RAM."""

    def place(
        self, component: str, network: nn.Module, name: str, weight: Tensor
    ) -> Tensor:
        """Put a weight, and what its layer stores beside it, in RAM."""
        if self.is_in_ram(component, network, name):
            module = network.get_submodule(name.rpartition(".")[0])
            for tensor in (weight, *stored_tensors(module)):
                if not tensor.is_meta:
                    tensor.data = tensor.data.to("cpu")
        return weight


@dataclass(eq=False)
class Offload(InRam):
    """Keeps components in RAM, each on the device only while a unit or decoder uses it."""

    offloaded: Collection[str]
    """The components of --offload_models that are loaded."""
    named: Collection[str]
    """What the flag names, with components that another stage loads."""
    _here: Mapping[str, ComponentInRam] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.kind = "move"
        self.flag = OFFLOAD_FLAG
        self.components = self.offloaded

    def describe(self, component: str) -> str:
        """Return it in words."""
        return "on the device only while used"

    def recorded(self) -> Mapping[str, Any]:
        """Return the flag with the components' names."""
        return {"offload_models": ",".join(self.named)}

    def is_in_ram(self, component: str, network: nn.Module, name: str) -> bool:
        """Return True."""
        return True

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Move frozen networks into RAM."""
        moved = {name: ComponentInRam(one, device) for name, one in networks.items()}
        self._here = {**self._here, **moved}

    def on_device(self, component: str) -> AbstractContextManager[object]:
        """Return a context in which the component is on the device."""
        here = self._here.get(component)
        return nullcontext() if here is None else here.on_device()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._here.values():
                stack.enter_context(one.readable())
            yield

    def readable(self) -> AbstractContextManager[object]:
        """Return a context in which weights can be read, in RAM."""
        return self._readable()

    def bytes(self, component: str, weights: Sequence[WeightSize]) -> KeptBytes:
        """Return them all in RAM, and on the device while used."""
        count = sum(one.size for one in weights)
        return KeptBytes(0, count, count)


@dataclass(eq=False)
class Swap(InRam):
    """Keeps the last blocks of networks with LoRA, or of denoisers, in RAM, each on the device only while it
    computes.
    """

    networks: Collection[str]
    option: str
    """The option that asks for it."""
    count: int
    """How many; `ALL_BLOCKS` for every one."""
    is_expected: bool
    """Whether blocks are recomputed in any case, which needs no saying."""
    _blocks: BlockSwap | None = field(default=None, init=False)
    _names: WeakKeyDictionary[nn.Module, tuple[str, ...]] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """What the names of weights of swapped blocks begin with, by network."""

    def __post_init__(self) -> None:
        self.kind = "move"
        self.flag = self.option
        self.components = self.networks
        self.recomputes = True
        self.unshardable = "swapped blocks must be whole in each process, but sharding gives each some rows"

    def describe(self, component: str) -> str:
        """Return it in words."""
        number = "all" if self.count == ALL_BLOCKS else str(self.count)
        noun = "block" if self.count == 1 else "blocks"
        return f"{number} {noun} swapped"

    def is_in_ram(self, component: str, network: nn.Module, name: str) -> bool:
        """Return whether a weight is of a block that is swapped."""
        if network not in self._names:
            last = last_blocks([*repeated_blocks(network)], self.count)
            self._names[network] = tuple(f"{block}." for block in last)
        return name.startswith(self._names[network])

    def check(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Raise UsageError for a network with fewer blocks, and where none has any."""
        blocks = [swapped_blocks(*one, self.count) for one in networks.items()]
        if not any(blocks):
            what = f"has no effect: {', '.join(networks)} repeats no blocks"
            raise UsageError(self.flag, what)
        if not self.is_expected:
            logger.info(f"{self.flag} turns gradient checkpointing on")

    def prepared(
        self,
        networks: Mapping[str, nn.Module],
        device: torch.device,
        saved: Mapping[str, Collection[str]] = NO_NAMES,
    ) -> None:
        """Swap blocks of networks that have their LoRA layers and are checkpointed; raises
        what `check` raises.
        """
        self.check(networks, device)
        self._blocks = self._blocks or BlockSwap(device)
        for name, network in networks.items():
            count = len(swapped_blocks(name, network, self.count))
            if count:
                self._blocks.add(name, network, count, saved.get(name, ()))

    def readable(self) -> AbstractContextManager[object]:
        """Return a context in which weights can be read, in RAM."""
        return nullcontext() if self._blocks is None else self._blocks.readable()

    def step_done(self) -> None:
        """Drop the blocks that a backward pass, or an image, ended with."""
        if self._blocks is not None:
            self._blocks.release()

    def bytes(self, component: str, weights: Sequence[WeightSize]) -> KeptBytes:
        """Return those of swapped blocks in RAM, and of the two largest on the device."""
        count = 1 + max((one.block for one in weights), default=-1)
        last = last_blocks(range(count), self.count)
        swapped = dict.fromkeys(last, 0)
        device = 0
        for one in weights:
            if one.block in swapped:
                swapped[one.block] += one.size
            else:
                device += one.size
        device += sum(sorted(swapped.values())[-2:])
        return KeptBytes(device, sum(swapped.values()))
