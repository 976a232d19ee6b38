"""Files in another layout, made from a network: what a layout's own test loads."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dstrain.components import Layout, Shapes


def in_layout(layout: Layout, state: Mapping[str, Tensor], names: Iterable[str] = ()) -> dict[str, Tensor]:
    """A network's state dict as a file in this layout has it: the inverse of `Layout.convert`.

    names: names in the file that the layout's table follows from, if it does.
    """
    known: Shapes = dict.fromkeys(names, ())
    origin = {own: layout.original(own, known) for own in state}
    shapes: dict[str, tuple[int, ...]] = {}
    for own, name in origin.items():
        rows = shapes[name][:1] if name in shapes else (0,)
        shapes[name] = (rows[0] + len(state[own]), *state[own].shape[1:]) if state[own].dim() else ()
    made = {name: torch.zeros(shapes[name], dtype=state[own].dtype) for own, name in origin.items()}
    for own, pieces in layout.convert(shapes).items():
        parts = [
            made[piece.name][piece.start : piece.stop] if made[piece.name].dim() else made[piece.name]
            for piece in pieces
        ]
        values = [state[own]] if len(pieces) == 1 else torch.split(state[own], [len(part) for part in parts])
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
    return made
