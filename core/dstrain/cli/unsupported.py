"""Give advice on flags that other trainers have and dstrain does not."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dstrain.errors import nearest

TABLE = Path(__file__).with_suffix(".json")


def advice() -> Mapping[str, Sequence[str]]:
    """Return each line of advice with the flags that it is for, without dashes."""
    table: Mapping[str, Sequence[str]] = json.loads(TABLE.read_text())
    return table


def no_such(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of an error about an unknown option: advice, or the nearest
    name.
    """
    flag = name.lstrip("-").replace("-", "_")
    for line, flags in advice().items():
        if flag in flags:
            return "no such option", line
    return (f"no such option{nearest(name, known)}",)
