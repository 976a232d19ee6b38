"""What the record of a plan has to have, for tests of plans without a run of stage 1."""

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
