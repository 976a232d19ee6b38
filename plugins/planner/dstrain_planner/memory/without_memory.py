"""Run code on tensors that have a shape and no memory, among real ones, and follow the
bytes that they would take.

`FakeTensorMode` of torch makes every tensor a fake one, and then a mask of a tokenizer
has no values to select by. Here a tensor is real as long as it is small and computed
from real ones, and a fake as soon as weights are in it.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from dstrain.plugin import PLAIN_TENSORS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
META = torch.device("meta")
LARGE = 2**22
"""Numbers from which a tensor is made a fake even if it could be computed."""


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """A mode in which tensors without memory and real ones compute together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = 0
        """Bytes of the fakes made in this mode that something still holds."""
        self.peak = 0
        """The most that `live` has been."""
        self.largest = 0
        """Bytes of the largest one made."""
        self._known: set[int] = set()

    def empty(self, like: Tensor) -> Tensor:
        """Return a fake of this shape and dtype on the CPU, which is not followed."""
        meta = torch.empty(like.shape, dtype=like.dtype, device=META)
        fake: Tensor = FakeTensor(self.fakes, meta, CPU)
        self._known.add(fake.untyped_storage()._cdata)
        return fake

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, on fakes if one is among its inputs."""
        named = dict(kwargs or {})
        leaves = tree_leaves((args, named))
        if any(isinstance(one, FakeTensor) for one in leaves):
            result = func(*_with_positions(func, args), **named)
        elif named.get("device") != META and _is_large(args, leaves):
            with self.fakes:
                result = func(*args, **named)
        else:
            return func(*args, **named)
        for one in tree_leaves(result):
            if isinstance(one, FakeTensor):
                self._follow(one)
        return result

    def _follow(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor until nothing holds its storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _with_positions(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operation, those that select by a real mask with the
    positions of it: how many there are is known, and a fake mask would not tell.
    """
    if func is not torch.ops.aten.index.Tensor:
        return args
    indices: list[Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype == torch.bool
        if is_mask and not isinstance(index, FakeTensor):
            indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _is_large(args: tuple[Any, ...], leaves: Iterable[Any]) -> bool:
    """Return whether an operation reads or makes a tensor that is better not computed."""
    if any(isinstance(one, Tensor) and one.numel() > LARGE for one in leaves):
        return True
    for one in args:
        if isinstance(one, list | tuple | torch.Size):
            sides = [side for side in one if isinstance(side, int)]
            if len(sides) == len(one) and torch.Size(map(abs, sides)).numel() > LARGE:
                return True
    return False


@contextmanager
def without_memory() -> Iterator[WithoutMemory]:
    """Enter the mode, in which units may return fakes."""
    known = PLAIN_TENSORS.set((*PLAIN_TENSORS.get(), FakeTensor))
    try:
        with warnings.catch_warnings(), WithoutMemory() as mode:
            # `read_only` compares addresses; those of fakes are all equal.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeT")
            # Torch itself asks every real tensor that becomes a fake for its gradient.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is")
            yield mode
    finally:
        PLAIN_TENSORS.reset(known)


def make_fake(mode: WithoutMemory, module: nn.Module) -> set[int]:
    """Replace the parameters and buffers of a module on the meta device by fakes of a
    mode; return what identifies their storages.
    """
    made: dict[int, Tensor] = {}
    keys = set()
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = mode.empty(tensor)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    made[id(tensor)] = fake
                table[name] = made[id(tensor)]  # type: ignore[assignment]  # of the same kind
                keys.add(made[id(tensor)].untyped_storage()._cdata)
    return keys
