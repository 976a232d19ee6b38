"""Count what a training step keeps for its backward pass, at the true shapes, without
memory and without weights.

One step of the run is made on tensors that have no memory; what autograd saves is
counted, each storage once, and no weight. With B the blocks that gradient checkpointing
recomputes, the bytes on the device are

    without checkpointing    outside + sum over B of what a block saves
    with checkpointing       outside + inputs of B + max(one block, copies)
    with offloading          outside + max(one block, copies)

where `outside` is what is saved by no block, `one block` the most that one saves, and
`copies` the trained weights in bf16, which autocast holds until the forward pass ends;
without checkpointing, these are among what is saved. `working` comes on top: what is computed
and not saved, the most at one time, and not less than two of the largest tensor, since a
backward pass holds the gradient of a result and of an input at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dstrain import Sample, SampleKey, TrainingModule
from dstrain.plugin import UsageError
from dstrain.plugin.functional import checkpoint_through
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from dstrain_planner.memory.without_memory import (
    WithoutMemory,
    make_fake,
    without_memory,
)

Storages = dict[int, torch.UntypedStorage]
"""What identifies a storage -> the storage, held so that no other gets its number."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a training step keeps for its backward pass."""

    outside: int
    """Saved by no block."""
    inputs: int
    """The inputs of all blocks, as far as they are not in `outside`."""
    blocks: int
    """Saved by all blocks together, as far as it is not in `outside`."""
    largest_block: int
    """The most that one block saves."""
    working: int
    """The most that is computed and not saved at one time."""
    encoding: int
    """The most at one time while the units that are cached run."""
    sample: int = 0
    """Bytes of the values that stage 1 stores of the sample."""

    def kept(self, checkpointing: bool, offload: bool, copies: int = 0) -> int:
        """Return the bytes on the device at the peak of a step; `copies` are the bytes
        of trained weights in bf16.
        """
        block = max(self.largest_block, copies)
        if offload:
            return self.outside + block + self.working
        if checkpointing:
            return self.outside + self.inputs + block + self.working
        return self.outside + self.blocks + self.working


class _Saved:
    """What autograd saves, in blocks and outside of them."""

    def __init__(self, mode: WithoutMemory, weights: set[int]) -> None:
        self.mode = mode
        self.weights = weights
        self.outside: Storages = {}
        self.inputs: Storages = {}
        self.blocks: list[Storages] = []
        self.working = 0
        self._held: Storages = {}
        """All that is in one of these."""
        self._held_bytes = 0
        self._inside = False

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves."""
        storages = self.blocks[-1] if self._inside else self.outside
        self._add(storages, tensor)
        self.working = max(self.working, self.mode.live - self._held_bytes)
        return tensor

    def block(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, as checkpointing does, and note what it gets and saves."""
        if self._inside:
            return function(*args, **kwargs)
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor):
                self._add(self.inputs, one)
        self.blocks.append({})
        self._inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._inside = False

    def _add(self, storages: Storages, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.weights:
            return
        storages[key] = storage
        if key not in self._held:
            self._held[key] = storage
            self._held_bytes += storage.nbytes()

    def count(self, encoding: int, sample: int) -> Activations:
        """Return the bytes."""
        blocks: Storages = {}
        for one in self.blocks:
            blocks |= one
        return Activations(
            outside=_bytes(self.outside),
            inputs=_bytes(self.inputs, self.outside),
            blocks=_bytes(blocks, self.outside),
            largest_block=max(map(_bytes, self.blocks), default=0),
            working=max(self.working, 2 * self.mode.largest),
            encoding=encoding,
            sample=sample,
        )


def _bytes(storages: Storages, others: Storages | None = None) -> int:
    return sum(
        storage.nbytes()
        for key, storage in storages.items()
        if key not in (others or {})
    )


def count_activations(
    module: TrainingModule, samples: Sequence[Sample], trains: bool = True
) -> Activations:
    """Run one step of a module on these samples without memory, and count.

    Raises what its units raise where they need numbers that nothing here has.

    Args:
        module: A module whose networks are on the meta device; it is of no use
            afterwards.
        samples: The samples of one batch.
        trains: Whether there is a training step after the units that are cached.
    """
    with without_memory() as mode:
        weights: set[int] = set()
        for network in module.pipeline.components.values():
            if isinstance(network, nn.Module):
                weights |= make_fake(mode, network)
        module.pipeline.device = torch.device("cpu")
        for sample in samples:
            module.plan(sample.inputs)
        saved = _Saved(mode, weights)
        for name, network in module.networks.items():
            try:
                checkpoint_through(name, network, saved.block)
            except UsageError:
                continue  # one without blocks saves what it saves outside of them
        cached = [
            module.preprocess(sample, module.plan(sample.inputs))
            if not module.stage
            else sample.values
            for sample in samples
        ]
        encoding = mode.peak
        mode.peak = mode.live
        mode.largest = 0
        stored = sum(one.nbytes for one in tree_leaves(cached[0]) if _is_stored(one))
        if not trains:
            return Activations(0, 0, 0, 0, 0, encoding, stored)
        stage = module.stage
        module.stage = "train"
        keys = [SampleKey(0, 0, 0, row) for row in range(len(samples))]
        ready = [
            Sample(values, sample.inputs)
            for values, sample in zip(cached, samples, strict=True)
        ]
        try:
            with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                # Held until all is counted, with what it keeps for a backward pass.
                losses = module.losses(ready, keys)
        finally:
            module.stage = stage
        counted = saved.count(encoding, stored)
        del losses
        return counted


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor)
