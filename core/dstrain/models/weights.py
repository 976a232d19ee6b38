"""Find the weights of components in files by their keys, and read them.

Files are safetensors, or those of `torch.save` (`.pth`, `.pt`, `.bin`), of which
nothing but tensors is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dstrain.errors import StateError
from dstrain.models.components import Component, Files
from dstrain.models.formats import NATIVE, Shape, Shapes, TensorSlice, join, shapes_of

TORCH_SUFFIXES = frozenset({".pth", ".pt", ".bin"})


class TensorInfo(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: Shape


def find_weights(paths: Iterable[Path]) -> dict[str, TensorInfo]:
    """Read the headers of files and return key -> tensor.

    Raises StateError for a file that is absent, damaged or more than tensors, and for
    a key that is there twice.
    """
    found: dict[str, TensorInfo] = {}
    for path in paths:
        for name, shape in _shapes(path).items():
            if name in found:
                other = found[name].path.name
                raise StateError(
                    str(path),
                    f"{name!r} is also in {other}; give the files of one model only",
                )
            found[name] = TensorInfo(path, name, shape)
    return found


def header(path: Path) -> Mapping[str, str]:
    """Return the header of a file that `find_weights` could read; {} if it has none."""
    if path.suffix in TORCH_SUFFIXES:
        return {}
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@dataclass(frozen=True)
class Weights:
    """The weights of a network in some files."""

    tensors: Mapping[str, TensorInfo]
    """Key in the files' format, without prefix -> tensor."""
    parts: Mapping[str, tuple[TensorSlice, ...]]
    """The network's own key -> the parts that are joined to that weight."""

    @classmethod
    def of(cls, files: Files) -> "Weights":
        """Find the weights of one component, without reading them; raises StateError as
        `find_weights` does.
        """
        tensors = {
            name.removeprefix(files.prefix): tensor
            for name, tensor in find_weights(files.paths).items()
            if name.startswith(files.prefix)
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return cls(tensors, (files.checkpoint_format or NATIVE).convert(shapes))

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each weight under the network's own key."""
        return {ours: self._joined_shape(parts) for ours, parts in self.parts.items()}

    def read(self, wanted: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
        """Read weights in these shapes, floating-point ones as `dtype`.

        Weights of the same parts share memory: they are tied.
        """
        read: dict[tuple[TensorSlice, ...], Tensor] = {}
        with ExitStack() as stack:
            readers: dict[Path, Callable[[TensorSlice], Tensor]] = {}
            for ours in wanted:
                parts = self.parts[ours]
                if parts in read:
                    continue
                values = []
                for part in parts:
                    tensor = self.tensors[part.name]
                    if tensor.path not in readers:
                        readers[tensor.path] = stack.enter_context(_reader(tensor.path))
                    value = readers[tensor.path](part._replace(name=tensor.name))
                    values.append(_copied(value, dtype))
                read[parts] = join(values)
        return {
            ours: read[self.parts[ours]].reshape(shape)
            for ours, shape in wanted.items()
        }

    def _joined_shape(self, parts: Sequence[TensorSlice]) -> Shape:
        shapes = [self.tensors[part.name].shape for part in parts]
        if len(parts) == 1 and parts[0].is_whole:
            return shapes[0]
        if len({shape[1:] for shape in shapes}) != 1:
            names = ", ".join(self.tensors[part.name].name for part in parts)
            raise StateError(
                str(self.tensors[parts[0].name].path),
                f"{names}: parts of one weight differ in shape",
            )
        rows = 0
        for part, shape in zip(parts, shapes, strict=True):
            rows += len(range(shape[0])[part.start : part.stop])
        return (rows, *shapes[0][1:])


def recognise(
    files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """Find the components in files of weights, each with its part of the files; twins,
    whose keys are the same, are together.

    Raises StateError if there is none, if there are keys of none, or if components
    cannot be told apart.
    """
    names = list(find_weights(files.paths))
    found: dict[Files, list[Component]] = {}
    by_prefix: dict[str, list[Component]] = {}
    for component in components:
        match = component.arrangement(names)
        if match is not None:
            part = replace(
                files, prefix=match.prefix, checkpoint_format=match.checkpoint_format
            )
            found.setdefault(part, []).append(component)
            by_prefix.setdefault(match.prefix, []).append(component)
    first = str(files.paths[0])
    its_names = f"its first names: {', '.join(names[:3])}"
    if not found:
        known = _names(c for c in components if c.key_patterns)
        raise StateError(first, f"is none of {known}; {its_names}")
    for fitting in by_prefix.values():
        if not all(component.same_keys_as(fitting[0]) for component in fitting):
            raise StateError(first, f"fits {_names(fitting)} alike; {its_names}")
    others = [name for name in names if not name.startswith(tuple(by_prefix))]
    if others:
        these = _names(c for fitting in by_prefix.values() for c in fitting)
        raise StateError(
            first,
            f"{len(others)} of its names belong to none of {these}: {', '.join(others[:3])}",
        )
    return [(tuple(fitting), part) for part, fitting in found.items()]


def _names(components: Iterable[Component]) -> str:
    return ", ".join(component.name for component in components)


def _copied(weight: Tensor, dtype: torch.dtype) -> Tensor:
    # Copied always: a mapped tensor's alignment depends on the file, and results depend
    # on alignment.
    kind = dtype if weight.is_floating_point() else weight.dtype
    return weight.to(kind, copy=True, memory_format=torch.contiguous_format)


def _shapes(path: Path) -> dict[str, Shape]:
    if path.suffix in TORCH_SUFFIXES:
        return shapes_of(_torch_weights(path))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise StateError(
            str(path), f"cannot be read as safetensors: {error}"
        ) from error


@contextmanager
def _reader(path: Path) -> Iterator[Callable[[TensorSlice], Tensor]]:
    """Yield a function that reads rows from the open file; the tensor may be mapped to
    it.
    """
    if path.suffix in TORCH_SUFFIXES:
        weights = _torch_weights(path)
        yield lambda part: part.of(weights[part.name])
        return
    with safe_open(path, framework="pt") as file:

        def read(part: TensorSlice) -> Tensor:
            if part.is_whole:
                whole: Tensor = file.get_tensor(part.name)
                return whole
            rows: Tensor = file.get_slice(part.name)[part.start : part.stop]
            return rows

        yield read


def _torch_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote, mapped, without running
    anything in it.
    """
    advice = "only files of tensors are read, as torch.save writes a state dict; or save it as safetensors"
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not foreign:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).strip().partition("\n")[0]
        raise StateError(
            str(path), f"cannot be read as weights: {reason}", advice
        ) from error
    if foreign:
        raise StateError(
            str(path), f"holds more than weights: {', '.join(sorted(foreign))}", advice
        )
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor)
        for name, weight in weights.items()
    ):
        raise StateError(
            str(path), "is no state dict: names with one tensor each", advice
        )
    return dict(weights)
