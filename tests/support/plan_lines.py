"""Lines of plans, as stage 1 writes them."""

from collections.abc import Mapping, Sequence
from typing import Any


def plan_line(
    row: int,
    values: Mapping[str, Any],
    chunk: int = 0,
    files: Sequence[Any] = (),
    folders: Sequence[Any] = (),
) -> dict[str, Any]:
    """A sample of a plan: `values` are addresses, or what `values.serialize` wrote."""
    return {
        "row": row,
        "line": row + 2,
        "chunk": chunk,
        "inputs": 0,
        "group": 0,
        "weight": 1,
        "values": {
            name: {"at": one} if isinstance(one, str) else one
            for name, one in values.items()
        },
        "files": files,
        "frame folders": folders,
    }
