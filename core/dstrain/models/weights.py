"""Weights in files: found by their names without reading them, in a network's own
arrangement or another, then read.

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
from dstrain.models.formats import NATIVE, TensorSlice

TORCH_SUFFIXES = frozenset({".pth", ".pt", ".bin"})


class Place(NamedTuple):
    """Where a tensor lies: its file, its name there, and its shape."""

    path: Path
    name: str
    shape: tuple[int, ...]


def find_weights(paths: Iterable[Path]) -> dict[str, Place]:
    """Read the headers of files: name -> where it lies.

    Raises StateError for a file that is absent, damaged or more than tensors, and for a
    name that is there twice.
    """
    places: dict[str, Place] = {}
    for path in paths:
        for name, shape in _shapes(path).items():
            if name in places:
                raise StateError(
                    str(path),
                    f"{name!r} is also in {places[name].path.name}; give the files of one model only",
                )
            places[name] = Place(path, name, shape)
    return places


def header(path: Path) -> Mapping[str, str]:
    """Read what a file that `find_weights` could read says of itself: {} for nothing,
    and for one of `torch.save`.
    """
    if path.suffix in TORCH_SUFFIXES:
        return {}
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@dataclass(frozen=True)
class Weights:
    """A network's weights as some files have them.

    places: name in the files' layout, without prefix -> where it lies. pieces: the
    network's own name -> what it is made of.
    """

    places: Mapping[str, Place]
    pieces: Mapping[str, tuple[TensorSlice, ...]]

    @classmethod
    def of(cls, files: Files) -> "Weights":
        """Find the weights of one component, without reading them; raises StateError as
        `find_weights` does.
        """
        prefix, found = files.prefix, find_weights(files.paths)
        places = {
            name.removeprefix(prefix): place
            for name, place in found.items()
            if name.startswith(prefix)
        }
        return cls(
            places,
            (files.checkpoint_format or NATIVE).convert(
                {name: place.shape for name, place in places.items()}
            ),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of the network's own names, its pieces joined."""
        return {own: self._joined(pieces) for own, pieces in self.pieces.items()}

    def read(
        self, wanted: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Read weights in these shapes, floating-point ones as `dtype`; those of the
        same pieces share memory.
        """
        made: dict[tuple[TensorSlice, ...], Tensor] = {}
        with ExitStack() as stack:
            paths = {
                self.places[piece.name].path
                for own in wanted
                for piece in self.pieces[own]
            }
            readers = {
                path: stack.enter_context(_reader(path)) for path in sorted(paths)
            }
            for pieces in dict.fromkeys(self.pieces[own] for own in wanted):
                places = [self.places[piece.name] for piece in pieces]
                parts = [
                    _copied(readers[place.path](piece._replace(name=place.name)), dtype)
                    for place, piece in zip(places, pieces, strict=True)
                ]
                made[pieces] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return {
            own: made[self.pieces[own]].reshape(shape) for own, shape in wanted.items()
        }

    def _joined(self, pieces: Sequence[TensorSlice]) -> tuple[int, ...]:
        shapes = [self.places[piece.name].shape for piece in pieces]
        if pieces == (TensorSlice(pieces[0].name),):
            return shapes[0]
        if len({shape[1:] for shape in shapes}) != 1:
            names = ", ".join(self.places[piece.name].name for piece in pieces)
            raise StateError(
                str(self.places[pieces[0].name].path),
                f"{names}: parts of one weight differ in shape",
            )
        rows = (
            len(range(*slice(p.start, p.stop).indices(s[0])))
            for p, s in zip(pieces, shapes, strict=True)
        )
        return (sum(rows), *shapes[0][1:])


def recognise(
    files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """Find the components in files of weights: (the component, or twins of which it is
    one; its part of the files).

    Raises StateError if there is none, if names of none are there too, or if components
    cannot be told apart.
    """
    names = list(find_weights(files.paths))
    found: dict[Files, list[Component]] = {}
    for component in components:
        arrangement = component.arrangement(names)
        if arrangement is not None:
            found.setdefault(
                replace(
                    files,
                    prefix=arrangement.prefix,
                    checkpoint_format=arrangement.checkpoint_format,
                ),
                [],
            ).append(component)
    by_prefix: dict[str, list[Component]] = {}
    for part, fitting in found.items():
        by_prefix.setdefault(part.prefix, []).extend(fitting)
    first = str(files.paths[0])
    if not found:
        known = ", ".join(
            component.name for component in components if component.key_patterns
        )
        raise StateError(
            first, f"is none of {known}; its first names: {', '.join(names[:3])}"
        )
    for fitting in by_prefix.values():
        if not all(component.same_keys_as(fitting[0]) for component in fitting):
            alike = ", ".join(component.name for component in fitting)
            raise StateError(
                first, f"fits {alike} alike; its first names: {', '.join(names[:3])}"
            )
    strangers = [name for name in names if not name.startswith(tuple(by_prefix))]
    if strangers:
        these = ", ".join(
            component.name for fitting in by_prefix.values() for component in fitting
        )
        raise StateError(
            first,
            f"{len(strangers)} of its names belong to none of {these}: {', '.join(strangers[:3])}",
        )
    return [(tuple(fitting), part) for part, fitting in found.items()]


def _copied(weight: Tensor, dtype: torch.dtype) -> Tensor:
    # Copied always: a mapped tensor's alignment depends on the file, and results depend
    # on alignment.
    kind = dtype if weight.is_floating_point() else weight.dtype
    return weight.to(kind, copy=True, memory_format=torch.contiguous_format)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix in TORCH_SUFFIXES:
        return {
            name: tuple(weight.shape) for name, weight in _torch_weights(path).items()
        }
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
    """Yield a function that reads a piece of the open file; the tensor may be mapped to
    it.
    """
    if path.suffix in TORCH_SUFFIXES:
        weights = _torch_weights(path)
        yield (
            lambda piece: (
                weights[piece.name]
                if _whole(piece)
                else weights[piece.name][piece.start : piece.stop]
            )
        )
        return
    with safe_open(path, framework="pt") as file:
        yield (
            lambda piece: (
                file.get_tensor(piece.name)
                if _whole(piece)
                else file.get_slice(piece.name)[piece.start : piece.stop]
            )
        )


def _whole(piece: TensorSlice) -> bool:
    return (piece.start, piece.stop) == (0, None)


def _torch_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, mapped, without running anything
    that it holds.
    """
    advice = "only files of tensors alone are read, as torch.save writes a state dict; or save it as safetensors"
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not foreign:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file ends in whatever its damage leads to
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
