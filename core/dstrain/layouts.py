"""Weights in memory, from a network's own arrangement to that of a layout's files, and back."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dstrain.components import Layout, Piece, Shapes


def shapes_in(layout: Layout, shapes: Shapes, names: Iterable[str] = ()) -> dict[str, tuple[int, ...]]:
    """The shapes that a file in this layout has, of a network's own names and shapes.

    names: names in the file that the layout's table follows from, if it does.
    """
    known: Shapes = dict.fromkeys(names, ())
    found: dict[str, tuple[int, ...]] = {}
    for own, shape in shapes.items():
        name = layout.original(own, known)
        rows = found[name][0] if found.get(name) else 0
        found[name] = (rows + shape[0], *shape[1:]) if shape else ()
    return found


def in_layout(layout: Layout, state: Mapping[str, Tensor], names: Iterable[str] = ()) -> dict[str, Tensor]:
    """A network's state dict as a file in this layout has it: the inverse of `Layout.convert`; names as above."""
    shapes = shapes_in(layout, {own: tuple(value.shape) for own, value in state.items()}, names)
    made: dict[str, Tensor] = {}
    for own, pieces in layout.convert(shapes).items():
        for piece in pieces:
            made.setdefault(piece.name, torch.zeros(shapes[piece.name], dtype=state[own].dtype))
        parts = [made[p.name][p.start : p.stop] if made[p.name].dim() else made[p.name] for p in pieces]
        values = [state[own]] if len(pieces) == 1 else torch.split(state[own], [len(part) for part in parts])
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
    return made


def out_of_layout(layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A network's state dict from what a file in this layout has: the inverse of `in_layout`."""
    table = layout.convert({name: tuple(weight.shape) for name, weight in weights.items()})
    state: dict[str, Tensor] = {}
    for own, pieces in table.items():
        parts = [weights[p.name] if p == Piece(p.name) else weights[p.name][p.start : p.stop] for p in pieces]
        state[own] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return state
