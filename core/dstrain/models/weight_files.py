"""Read tensors from files of weights: safetensors, or those of `torch.save` (`.pth`, `.pt`,
`.bin`), of which nothing but tensors is read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dstrain.errors import StateError
from dstrain.models.formats import Shape, shapes_of
from dstrain.storage import tensor_shapes
from dstrain.storage.safetensors import naming_faults, opened

TORCH_SUFFIXES = frozenset({".pth", ".pt", ".bin"})
MAPPED = 2**30
"""Bytes that are read from a file until it is opened again."""

Reader = Callable[[str], Tensor]
"""(name of a tensor in a file) -> that."""


class TensorInfo(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: Shape


class OpenFiles:
    """Files that are open while weights are read from them.

    What was read of a mapped file counts as RAM of this process until the file is closed.
    So it is closed after its last tensor, and opened again after each GiB.
    """

    def __init__(self, wanted: Iterable[TensorInfo]) -> None:
        """Begin with no file open; `wanted` are all tensors that will be read."""
        self._left = Counter(tensor.path for tensor in wanted)
        self._open: dict[Path, tuple[Reader, ExitStack]] = {}
        self._read: Counter[Path] = Counter()
        """Bytes that were read of an open file."""

    def __enter__(self) -> "OpenFiles":
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""
        for path in list(self._open):
            self._close(path)

    @contextmanager
    def reading(self, tensor: TensorInfo) -> Iterator[Tensor]:
        """Yield a tensor, maybe mapped to its file: copy it. Raises StateError."""
        path = tensor.path
        if path not in self._open:
            stack = ExitStack()
            self._open[path] = (stack.enter_context(_reader(path)), stack)
        value = self._open[path][0](tensor.name)
        self._read[path] += value.nbytes
        yield value
        del value  # what is mapped stays so as long as a tensor of it lives
        self._left[path] -= 1
        if not self._left[path] or self._read[path] >= MAPPED:
            self._close(path)

    def _close(self, path: Path) -> None:
        self._open.pop(path)[1].close()
        del self._read[path]


def shapes_in(path: Path) -> dict[str, Shape]:
    """Return the shape of each tensor in a file; raises StateError for a file that is
    absent, damaged or more than tensors.
    """
    if path.suffix in TORCH_SUFFIXES:
        return shapes_of(_torch_weights(path))
    return dict(tensor_shapes(path))


def header(path: Path) -> Mapping[str, str]:
    """Return the header of a file that `shapes_in` could read; {} if it has none."""
    if path.suffix in TORCH_SUFFIXES:
        return {}
    with opened(path, "np") as file:
        return dict(file.metadata() or {})


@contextmanager
def _reader(path: Path) -> Iterator[Reader]:
    """Yield a function that returns a tensor of the open file, possibly mapped to it."""
    if path.suffix in TORCH_SUFFIXES:
        yield _torch_weights(path).__getitem__
    else:
        with opened(path) as file:

            def tensor(name: str) -> Tensor:
                # Files are open while others are read, so a fault is named here.
                with naming_faults(path):
                    whole: Tensor = file.get_tensor(name)
                    return whole

            yield tensor


def _torch_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote, mapped, without running
    anything in it; those of dictionaries in it as 'outer.inner'.
    """
    advice = "save a state dict of tensors with torch.save, or save it as safetensors"
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not foreign:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).strip().partition("\n")[0]
        what = f"cannot be read as weights: {reason}"
        raise StateError(path, what, advice) from error
    if foreign:
        what = f"contains more than weights: {', '.join(sorted(foreign))}"
        raise StateError(path, what, advice)
    try:
        flat = _flat(weights) if isinstance(weights, dict) else {"": weights}
    except RecursionError:  # a dictionary may be inside itself
        flat = {"": weights}
    if not all(name and isinstance(weight, Tensor) for name, weight in flat.items()):
        raise StateError(path, "is not a state dict of tensors", advice)
    return flat


def _flat(weights: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is in dictionaries in a dictionary under both names, 'outer.inner'; what
    has no name becomes ''.
    """
    found: dict[str, Any] = {}
    for name, value in weights.items():
        if not isinstance(name, str):
            found[""] = value
        elif isinstance(value, dict):
            inside = _flat(value).items()
            found |= {inner and f"{name}.{inner}": one for inner, one in inside}
        else:
            found[name] = value
    return found
