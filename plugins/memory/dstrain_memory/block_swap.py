"""Block swap: frozen weights of a network's last blocks live in RAM, and are on the device
only while their block computes.

A block's weights are copied to the device before its forward pass, and again before its
recomputation in the backward pass, each time while the block before it computes. They are
dropped after its forward pass, and in the backward pass when the next block to compute
begins its recomputation: autograd runs what was recorded last first, so then every
gradient of the block is there. (The end of a block's backward pass is no place for it:
`register_full_backward_hook` of a block that is called with keywords alone, as those of
diffusers are, fires before any gradient inside it.) It is what musubi-tuner calls a
one-way swap, attached to networks from outside.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from dstrain.plugin import UsageError
from dstrain.plugin.functional import repeated_blocks
from torch import nn

from dstrain_memory.ram import WeightsInRam, move_others, stored_tensors

Block = TypeVar("Block")
ALL_BLOCKS = -1
"""A number of swapped blocks that stands for every block."""
FLAG = "--blocks_to_swap"
CHECKPOINT = "_gradient_checkpointing_func"
"""A layer of transformers calls this within its forward pass, so that hooks of the layer
are not called when it is recomputed."""
CUDA: Any = torch.cuda
"""Its streams and events have no types."""


@dataclass
class SwappedBlock:
    """A block whose weights live in RAM, and its neighbours among the swapped blocks of
    its network, by number.
    """

    name: str
    weights: WeightsInRam
    previous: int | None
    next: int | None = None
    copied: Any = None
    """On a GPU: the event at the end of the copy."""


class BlockSwap:
    """The swapped blocks of all networks in training.

    No more than two are on the device: the one that computes and the next to do so.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without blocks.

        device: The device that networks compute on.
        """
        self.blocks: list[SwappedBlock] = []
        self.present: dict[int, SwappedBlock] = {}
        """The blocks whose weights are on the device, by number."""
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._copies: Any = None
        """On a GPU: the stream of copies."""
        self._computed: Any = None
        """On a GPU: the event at the end of what used the block that was dropped last."""

    def add(
        self,
        component: str,
        network: nn.Module,
        count: int,
        saved: Collection[str] = (),
    ) -> None:
        """Swap the last `count` blocks of a network; `ALL_BLOCKS` for every one.

        Its trained layers exist and its blocks are checkpointed. They may be in RAM; what
        they train and their buffers are put on the device. Raises UsageError for a network with fewer blocks.

        saved: As in `stored_tensors`.
        """
        if self._is_cuda and self._copies is None:
            self._copies = CUDA.Stream(self._device)
        previous: int | None = None
        for name, block in swapped_blocks(component, network, count).items():
            number = len(self.blocks)
            weights = WeightsInRam(stored_tensors(network, name, saved), self._device)
            move_others(block, self._device)
            self.blocks.append(SwappedBlock(f"{component}.{name}", weights, previous))
            if previous is not None:
                self.blocks[previous].next = number
            previous = number
            self._attach(block, number)

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the weights of all blocks can be read, in RAM."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.weights.readable())
            yield

    def release(self) -> None:
        """Drop what is on the device: after a backward pass, the blocks it ended with."""
        self._drop_all_but(())

    def _attach(self, block: nn.Module, number: int) -> None:
        def before(module: nn.Module, *inputs: object) -> None:
            self._before(number, module)

        def after(module: nn.Module, *results: object) -> None:
            if not _in_backward_pass():
                self._drop(number)

        checkpoint: Any = getattr(block, CHECKPOINT, None)
        if checkpoint is not None:

            def checkpoint_with_weights(
                function: Callable[..., object], *inputs: object
            ) -> object:
                def recomputed(*inputs: object) -> object:
                    self._before(number, block)
                    return function(*inputs)

                return checkpoint(recomputed, *inputs)

            setattr(block, CHECKPOINT, checkpoint_with_weights)
        block.register_forward_pre_hook(before)
        # Also when the block fails: nothing stays on the device.
        block.register_forward_hook(after, always_call=True)

    def _before(self, number: int, module: nn.Module) -> None:
        block = self.blocks[number]
        following = block.next
        if _in_backward_pass():
            following = block.previous
        elif torch.is_grad_enabled() and not _is_checkpointed(module):
            raise UsageError(
                FLAG,
                f"{block.name} ({type(module).__name__}) is called without gradient checkpointing",
                "its weights would be gone in the backward pass; train without the flag",
            )
        wanted = [number] if following is None else [number, following]
        self._drop_all_but(wanted)
        for one in wanted:
            self._load(one)
        if block.copied is not None:
            CUDA.current_stream(self._device).wait_event(block.copied)

    def _load(self, number: int) -> None:
        if number in self.present:
            return
        block = self.blocks[number]
        self.present[number] = block
        if not self._is_cuda:
            block.weights.load()
            return
        if self._computed is not None:
            # Python runs ahead of the GPU: the memory of a block is free when the GPU is
            # done with it, and without waiting others would be allocated.
            self._computed.synchronize()
        now = CUDA.current_stream(self._device)
        with CUDA.stream(self._copies):
            block.weights.load().record_stream(now)
            block.copied = CUDA.Event()
            block.copied.record()

    def _drop_all_but(self, numbers: Collection[int]) -> None:
        for number in [one for one in self.present if one not in numbers]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        block = self.present.pop(number, None)
        if block is None:
            return
        block.weights.drop()
        block.copied = None
        if self._is_cuda:
            self._computed = CUDA.Event()
            self._computed.record(CUDA.current_stream(self._device))


def swapped_blocks(
    component: str, network: nn.Module, count: int
) -> Mapping[str, nn.Module]:
    """Return the last `count` blocks that a network repeats, by name; all of them for
    `ALL_BLOCKS`.

    Raises UsageError for a network with fewer blocks.
    """
    found = repeated_blocks(network)
    if count > len(found):
        what = f"{count} is more than the {len(found)} blocks of {component}"
        advice = [f"{FLAG} {len(found)} swaps all of them"] if found else []
        raise UsageError(FLAG, what, *advice)
    return dict(last_blocks([*found.items()], count))


def last_blocks(blocks: Sequence[Block], count: int) -> Sequence[Block]:
    """Return the blocks of a network that are swapped: the last `count`, or all if it is
    `ALL_BLOCKS` or more than there are.
    """
    if count == ALL_BLOCKS:
        return blocks
    return blocks[max(0, len(blocks) - count) :]


def _in_backward_pass() -> bool:
    """Return whether autograd runs: then a forward pass is a recomputation.

    torch's own checkpointing asks the same.
    """
    return torch._C._current_graph_task_id() != -1


def _is_checkpointed(block: nn.Module) -> bool:
    """Return whether something else than autograd keeps what the backward pass needs, as
    checkpointing does, or the block itself is going to see to that.
    """
    if getattr(block, CHECKPOINT, None) is not None and block.training:
        return bool(block.gradient_checkpointing)
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
