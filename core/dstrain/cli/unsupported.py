"""Give advice on flags that other trainers have and dstrain does not."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from dstrain.config import flags
from dstrain.config.options import GenerateConfig
from dstrain.errors import SIMILAR, nearest
from dstrain.installed import how_to_have

FLAG = re.compile(r"--(\w+)")
ELSEWHERE = frozenset({"config_file"})
"""Flags in the advice that are another program's."""
TABLE = Path(__file__).with_suffix(".json")
UNUSED_VARIABLES = MappingProxyType(
    {
        "DIFFSYNTH_ATTENTION_IMPLEMENTATION": "attention is what DIFFUSERS_ATTN_BACKEND names, by default torch's own",
        "DIFFSYNTH_DISK_MAP_BUFFER_SIZE": "weights are read from disk one by one, without a buffer",
    }
)
"""Environment variables of DiffSynth-Studio that have no effect, each with the reason."""


def unused_variables() -> list[str]:
    """Return a line for each variable that is set and has no effect."""
    return [
        f"variable {name} has no effect: {why}"
        for name, why in UNUSED_VARIABLES.items()
        if os.environ.get(name)
    ]


def advice() -> Mapping[str, Sequence[str]]:
    """Return each line of advice with the flags that it is for, without dashes; `*`
    stands for anything.
    """
    table: Mapping[str, Sequence[str]] = json.loads(TABLE.read_text("utf-8"))
    return table


def no_such(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of an error about an unknown option: advice, if what it names is
    known here, or the nearest name.
    """
    known = list(known)
    if absent := how_to_have("options", name.lstrip("-").replace("-", "_")):
        return "no such option is installed", absent
    names_here = {one.lstrip("-") for one in known} | ELSEWHERE
    flag = name.lstrip("-").replace("-", "_")
    for line, meant in advice().items():
        is_meant = any(fnmatchcase(flag, one) for one in meant)
        if is_meant and names_here.issuperset(FLAG.findall(line)):
            return "no such option", line
    hint = nearest(name, known, SIMILAR)
    if not hint and flag in {one.name for one in flags(GenerateConfig)}:
        return "no such option", "it is an option of `dstrain generate`"
    return (f"no such option{hint}",)
