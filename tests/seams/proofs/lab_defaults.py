"""Defaults: what a lab has written in a file, for each model that it trains."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.plugin import Defaults, UsageError, hookimpl

api = 2


@hookimpl
def dstrain_defaults(
    options: Mapping[str, Any], disabled_plugins: Collection[str]
) -> Sequence[Defaults]:
    if "LAB" not in os.environ:
        return []
    path = Path(os.environ["LAB"])
    values = json.loads(path.read_text()).get(options.get("model"), {})
    if not isinstance(values, dict):
        raise UsageError(str(path), "expected option -> value for each model")
    notes = {"extra_inputs": "the lab's datasets have this column"}
    return [Defaults(f"the lab's {path.name}", values, notes)]
