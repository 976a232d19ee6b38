"""The record and the lines of a plan, for tests of plans without a run of stage 1."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

IDENTITY = MappingProxyType({"family": "stored", "variant": "base", "task": "sft"})


def about(dataset: str = "d") -> dict[str, Any]:
    """What a plan records of the run that made it: one set of inputs, and no model."""
    named: Any = ("components", "configs", "models", "files", "versions")
    return {
        "dataset": {"path": dataset, "sha256": "", "rows": 1, "folders": []},
        "columns": [],
        "inputs": [[]],
        "prompt_rows": [],
        **{name: {} for name in named},
    }


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
