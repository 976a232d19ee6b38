"""Frozen weights that lie in RAM, and are on a device only while they are needed there."""

import math
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Bytes. Results on a CPU depend on the alignment of weights; a tensor of torch's own has
64 bytes."""


class WeightsInRam:
    """Frozen weights that lie in RAM as one piece, which is copied to the device as a
    whole, and dropped there: it never changes, so that nothing is copied back.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Move tensors into RAM; they have no numbers until `load`.

        Args:
            tensors: What modules keep their weights in, from `stored_tensors`. They stay
                the same objects, and have other data.
            device: The device that computes with them.
        """
        self._device = device
        self._tensors = tuple(tensors)
        self._places: list[tuple[int, int]] = []
        end = 0
        for tensor in self._tensors:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + tensor.nbytes
            self._places.append((start, end))
        self._absent = [_without_numbers(tensor, device) for tensor in self._tensors]
        self._ram = torch.empty(end, dtype=torch.uint8)
        if device.type == "cuda":
            _pin(self._ram, device)
        for tensor, view in zip(self._tensors, self._views(self._ram), strict=True):
            view.copy_(tensor.data)
            tensor.data = view
        self._copy: Tensor | None = None
        self.drop()

    @property
    def nbytes(self) -> int:
        """Return how many bytes a copy of them has."""
        return self._ram.nbytes

    def load(self) -> Tensor:
        """Copy them to the device, on the current stream; return the copy."""
        self._copy = self._ram.to(self._device, non_blocking=True, copy=True)
        self._show(self._copy)
        return self._copy

    def drop(self) -> None:
        """Free the copy: weights then have their shapes, and no numbers."""
        self._copy = None
        for tensor, absent in zip(self._tensors, self._absent, strict=True):
            tensor.data = absent

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the weights can be read, wherever they are."""
        if self._copy is not None:
            yield
            return
        try:
            self._show(self._ram)
            yield
        finally:
            self.drop()

    def _show(self, piece: Tensor) -> None:
        for tensor, view in zip(self._tensors, self._views(piece), strict=True):
            tensor.data = view

    def _views(self, piece: Tensor) -> Iterator[Tensor]:
        for absent, (start, end) in zip(self._absent, self._places, strict=True):
            yield piece[start:end].view(absent.dtype).view(absent.shape)


PIECE = 1 << 30
"""Bytes of RAM that are filled at once: while weights are moved, there are as many more."""


class ComponentInRam:
    """A component whose weights lie in RAM, and are on the device only while it is
    used.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """Move a frozen network into RAM.

        device: The device that computes with it.
        """
        self._is_present = False
        self._pieces: list[WeightsInRam] = []
        waiting: list[Tensor] = []
        for tensor in stored_tensors(network):
            waiting.append(tensor)
            if sum(one.nbytes for one in waiting) >= PIECE:
                self._pieces.append(WeightsInRam(waiting, device))
                waiting = []
        self._pieces.append(WeightsInRam(waiting, device))
        move_others(network, device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the component is on the device."""
        if self._is_present:
            yield
            return
        self._is_present = True
        try:
            for piece in self._pieces:
                piece.load()
            yield
        finally:
            self._is_present = False
            for piece in self._pieces:
                piece.drop()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Inside, the weights can be read, wherever they are."""
        with ExitStack() as stack:
            for piece in self._pieces:
                stack.enter_context(piece.readable())
            yield


def stored_tensors(
    network: nn.Module, part: str = "", saved: Collection[str] = ()
) -> list[Tensor]:
    """Return the tensors that hold the frozen weights of a part of a network, each once:
    of a weight that is made of others, those. What the rest of the network holds, too, is
    not among them, and no buffer, which a network may write to; but those of linear
    layers are the scales of weights that are stored.

    Args:
        network: The network.
        part: The dotted name of a module of it; '' for all of it.
        saved: The names of frozen weights that are left out, since they are saved with
            what is trained.
    """
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for name, module in network.named_modules():
        is_inside = not part or f"{name}.".startswith(f"{part}.")
        own = [*module.named_parameters(name, recurse=False)]
        if isinstance(module, nn.Linear):
            own += module.named_buffers(name, recurse=False)
        for full_name, tensor in own:
            if not is_inside or full_name in saved:
                others.add(id(tensor))
            elif not tensor.requires_grad:
                found[id(tensor)] = tensor
    alone = (one for key, one in found.items() if key not in others)
    return [part for tensor in alone for part in _parts(tensor)]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor is made of: itself, what a subclass keeps its
    numbers in, and what bitsandbytes keeps beside its own.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        for name in names:
            yield from _parts(getattr(tensor, name))
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (one for one in vars(state).values() if isinstance(one, Tensor))
        state = getattr(state, "state2", None)


def _without_numbers(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of this shape and dtype that takes the memory of one number: NaN,
    so that nothing is computed with it unnoticed; of integers one that is no index.
    """
    number = math.nan
    if not tensor.is_floating_point():
        kind = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        number = torch.iinfo(kind).max
    one = torch.full((1,) * tensor.ndim, number, dtype=tensor.dtype, device=device)
    return one.expand(tensor.shape)


def move_others(part: nn.Module, device: torch.device) -> None:
    """Put on the device what a part of a network keeps there: what it trains, its
    buffers, and weights that it shares. Absent weights are there already.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data = tensor.data.to(device)


def _pin(ram: Tensor, device: torch.device) -> None:
    """Lock memory in place, so that copies from it run beside computation.

    `Tensor.pin_memory` would round its size up to a power of two. Where the system
    refuses, copies are correct and slower.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # of torch
    if not ram.nbytes:
        return
    if int(runtime.cudaHostRegister(ram.data_ptr(), ram.nbytes, 0)) == 0:
        # At the end of the process the driver does it.
        weakref.finalize(ram, runtime.cudaHostUnregister, ram.data_ptr()).atexit = False
        return
    # CUDA keeps the error of the refusal, and torch raises it at the next kernel,
    # whichever that is: here, where it is harmless.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
