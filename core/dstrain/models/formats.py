"""Checkpoint formats: how the keys of a published file map to those of a network."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import filter as names_like
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
"""Names of weights -> their shapes."""
Part = Callable[[Shapes, str], tuple[int, int | None]]
"""(the file's shapes, a name in it) -> the first row wanted of that tensor and the one
after the last, or None.
"""


class TensorSlice(NamedTuple):
    """Rows `start` to `stop` (along the first axis; by default all) of the tensor
    `name` in a file.
    """

    name: str
    start: int = 0
    stop: int | None = None


class KeyMap(NamedTuple):
    """A line of a layout's table: the file's name for a module or weight of the
    network.

    Each `*` stands for a number, the same ones in the same order on both sides. What
    follows (`.weight`) is kept. Several rows may name the same `own`: it is their parts
    joined. part: which rows of the file's tensor; None: all.
    """

    own: str
    file: str
    part: Part | None = None


def nth_of(index: int, count: int) -> Part:
    """Part `index`, counted from 0, of `count` parts of equal size, such as the keys of
    a fused query, key, value.
    """
    return partial(_nth_of, index, count)


def _nth_of(index: int, count: int, shapes: Shapes, name: str) -> tuple[int, int]:
    rows = shapes[name][0]
    return index * rows // count, (index + 1) * rows // count


def same_config(content: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any]:
    """`CheckpointFormat.configuration` of a layout that is published with config.json in the
    network's own terms.
    """
    return content


@dataclass(frozen=True)
class CheckpointFormat:
    """Another arrangement of a network's weights than its own, as in original
    checkpoints.

    marks: patterns of names, all of which files in this layout have. rows: the table,
    or how it follows from the files' shapes; it holds for any width and depth. Names
    that no row knows are the network's own. ignored: patterns of names in such files
    that the network has no use for. configuration: (content of a config.json of this
    layout's publisher, own shapes or {} without files) -> content in the network's
    terms, or None if it is no such content. A config.json beside files of a layout
    without it, or of files whose names have a prefix, is left aside: it is another
    component's.
    """

    key_patterns: tuple[str, ...]
    rows: tuple[KeyMap, ...] | Callable[[Shapes], tuple[KeyMap, ...]] = ()
    ignored: tuple[str, ...] = ()
    configuration: (
        Callable[[Mapping[str, Any], Shapes], Mapping[str, Any] | None] | None
    ) = None

    def convert(self, shapes: Shapes) -> dict[str, tuple[TensorSlice, ...]]:
        """Return what each of the network's weights is made of: its pieces, to be
        joined along the first axis.

        shapes: names in the file, without prefix. Axes of length 1 may be more or fewer
        than the network's.
        """
        table = [
            (place, row, _pattern(row.file))
            for place, row in enumerate(self._rows(shapes))
        ]
        found: dict[str, list[tuple[int, TensorSlice]]] = {}
        for name in shapes:
            hits = [
                (place, row, hit)
                for place, row, pattern in table
                if (hit := pattern.fullmatch(name))
            ]
            longest = max((len(row.file) for _, row, _ in hits), default=0)
            for place, row, hit in hits:
                if len(row.file) == longest:
                    piece = TensorSlice(
                        name, *(row.part(shapes, name) if row.part else ())
                    )
                    found.setdefault(_filled(row.own, hit), []).append((place, piece))
            if not hits and not self.ignores(name):
                found[name] = [(0, TensorSlice(name))]
        return {
            own: tuple(piece for _, piece in sorted(parts))
            for own, parts in found.items()
        }

    def original(self, own: str, shapes: Shapes) -> str:
        """The name in such a file of one of the network's weights."""
        for row in sorted(self._rows(shapes), key=lambda row: -len(row.own)):
            if hit := _pattern(row.own).fullmatch(own):
                return _filled(row.file, hit)
        return own

    def ignores(self, name: str) -> bool:
        """Whether the network has no use for this name in a file."""
        return any(names_like([name], pattern) for pattern in self.ignored)

    def _rows(self, shapes: Shapes) -> tuple[KeyMap, ...]:
        return self.rows(shapes) if callable(self.rows) else self.rows


@dataclass(frozen=True)
class LoraKeyFormat:
    """How the LoRA files of one program name a component's layers.

    program: what `dstrain export --format` calls it. prefixes: what the names begin
    with; the first is the one written, '' for none. layout: whose names follow; None:
    the network's own. flat: there with '_' in the place of '.'.
    """

    program: str
    prefixes: tuple[str, ...]
    checkpoint_format: CheckpointFormat | None = None
    underscored: bool = False


def _pattern(template: str) -> re.Pattern[str]:
    if not template:
        return re.compile(r"(?P<rest>.+)")
    return re.compile(re.escape(template).replace(r"\*", r"(\d+)") + r"(?P<rest>|\..+)")


def _filled(template: str, hit: re.Match[str]) -> str:
    numbers = iter(hit.groups()[:-1])
    name = re.sub(r"\*", lambda _: next(numbers), template)
    rest = hit["rest"]
    return (
        rest.removeprefix(".")
        if not name
        else name + ("" if rest.startswith(".") or not rest else ".") + rest
    )


def checkpoint_shapes(
    checkpoint_format: CheckpointFormat, shapes: Shapes, names: Iterable[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The shapes that a file in this layout has, of a network's own names and shapes.

    names: names in the file that the layout's table follows from, if it does.
    """
    known: Shapes = dict.fromkeys(names, ())
    found: dict[str, tuple[int, ...]] = {}
    for own, shape in shapes.items():
        name = checkpoint_format.original(own, known)
        rows = found[name][0] if found.get(name) else 0
        found[name] = (rows + shape[0], *shape[1:]) if shape else ()
    return found


def to_checkpoint(
    checkpoint_format: CheckpointFormat,
    state: Mapping[str, Tensor],
    names: Iterable[str] = (),
) -> dict[str, Tensor]:
    """A network's state dict as a file in this layout has it: the inverse of
    `CheckpointFormat.convert`; names as above.
    """
    shapes = checkpoint_shapes(
        checkpoint_format,
        {own: tuple(value.shape) for own, value in state.items()},
        names,
    )
    made: dict[str, Tensor] = {}
    for own, pieces in checkpoint_format.convert(shapes).items():
        for piece in pieces:
            made.setdefault(
                piece.name, torch.zeros(shapes[piece.name], dtype=state[own].dtype)
            )
        parts = [
            made[p.name][p.start : p.stop] if made[p.name].dim() else made[p.name]
            for p in pieces
        ]
        values = (
            [state[own]]
            if len(pieces) == 1
            else torch.split(state[own], [len(part) for part in parts])
        )
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
    return made


def from_checkpoint(
    checkpoint_format: CheckpointFormat, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A network's state dict from what a file in this layout has: the inverse of
    `in_layout`.
    """
    table = checkpoint_format.convert(
        {name: tuple(weight.shape) for name, weight in weights.items()}
    )
    state: dict[str, Tensor] = {}
    for own, pieces in table.items():
        parts = [
            weights[p.name]
            if p == TensorSlice(p.name)
            else weights[p.name][p.start : p.stop]
            for p in pieces
        ]
        state[own] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return state


NATIVE = CheckpointFormat(key_patterns=())
"""The layout of files that have a network's own names."""
