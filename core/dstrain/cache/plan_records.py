"""Say what the record of a plan has: one that a stranger wrote is refused where it is read,
not half-way through a command.

What it has is that of `plan_identity`, `CacheInfo`, `row_line` and `as_repeatable`; a test
compares it with records that stage 1 writes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, get_args

from dstrain.cache.addresses import HASH

Shape = Any
"""What data has to be: of one of some types, a text of a pattern, [a list of a shape], (a
list with an item of each), {entries by name}, or what a function finds nothing wrong with.
A name with ? at its end may be absent; OTHERS stands for all other names.
"""
OTHERS = "*"


@dataclass(frozen=True)
class CacheInfo:
    """The record that a plan of the feature cache keeps of the run that filled it. The
    names of its fields are part of the format.
    """

    dataset: Mapping[str, Any]
    """`path` and `sha256` of the metadata, its number of `rows`, skipped ones included,
    the `folders` in which its files are, of which a line of the plan names those that
    no line before it does, and its first `caption`."""
    columns: Sequence[str]
    inputs: Sequence[Sequence[str]]
    """The sets of inputs that samples have."""
    components: Mapping[str, str]
    """Component -> digest of its files, its configuration and the family's code for it."""
    configs: Mapping[str, Mapping[str, Any]]
    """Component -> configuration."""
    models: Mapping[str, str]
    """Component -> the published model that its files were named by, with its revision."""
    files: Mapping[str, Sequence[tuple[str, str, Sequence[Any]]]]
    """Component -> its files: each with its path, its place in a folder ('' for weights)
    and what `Digests.record` returned.
    """
    versions: Mapping[str, str]
    prompt_rows: Sequence[Mapping[str, Any]] = ()
    """One line for each row that plugins add; see `row_line`."""
    sizes: Sequence[Sequence[Any]] = ()
    """What `GroupSize` says of each signature."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The `words` of the command of stage 1, and the `folder` in which it ran; in plans of
    earlier versions its options by name."""
    repeatable: Mapping[str, Any] = field(default_factory=dict)
    """What stage 1 compares to see that it has nothing to do; see `unchanged`."""

    def name_row(self, row: Mapping[str, Any]) -> str:
        """Name a row of the plan in messages: 'metadata.csv:3'."""
        number = row["row"]
        path = self.dataset["path"]
        for part in self.dataset.get("parts", ()):
            path = part["path"]
            if number < part["rows"]:
                break
            number -= part["rows"]
        return f"{Path(path).name}:{row['line']}"

    @property
    def rows_of_parts(self) -> list[int]:
        """Return the number of rows of each dataset."""
        parts = self.dataset.get("parts") or [self.dataset]
        return [int(part["rows"]) for part in parts]


def check_record(record: Any, files: Mapping[str, Shape]) -> None:
    """Raise ValueError, which says what is wrong, unless data is the record of a plan, with
    what is asked for about its files.
    """
    for problem in problems(record, {**PLAN, **files}, "it"):
        raise ValueError(problem.removeprefix("it."))


def problems(data: Any, shape: Shape, place: str) -> Iterator[str]:
    """Yield what is wrong with JSON data of this place in a record."""
    if isinstance(shape, FunctionType):
        yield from shape(data, place)
    elif isinstance(shape, re.Pattern):
        if type(data) is not str or not shape.fullmatch(data):
            yield f"{place} is not {shape.pattern}"
    elif isinstance(shape, list | tuple):
        if type(data) is not list or (type(shape) is tuple and len(data) != len(shape)):
            yield f"{place} is not a list of its length"
            return
        for number, item in enumerate(data):
            kind = shape[number] if isinstance(shape, tuple) else shape[0]
            yield from problems(item, kind, f"{place}[{number}]")
    elif isinstance(shape, Mapping):
        if type(data) is not dict:
            yield f"{place} has no names"
            return
        for name in shape:
            if name not in data and name != OTHERS and not name.endswith("?"):
                yield f"{place} has no {name}"
        known = {name.removesuffix("?"): kind for name, kind in shape.items()}
        for name, entry in data.items():
            kind = known.get(name, known.get(OTHERS))
            inner = f"{place}.{name[:100]}"
            if kind is None:
                yield f"{inner} is nothing that this version of dstrain knows"
            else:
                yield from problems(entry, kind, inner)
    # Not isinstance: a bool is an int to Python, but not to JSON.
    elif shape is not object and type(data) not in (get_args(shape) or (shape,)):
        yield f"{place} is a {type(data).__name__}"


def literal(data: Any, place: str) -> Iterator[str]:
    """Yield what is wrong with what `values.serialize` writes of a value without tensors."""
    kinds = [*data] if type(data) is dict else []
    if len(kinds) != 1 or kinds[0] not in LITERALS:
        yield f"{place} is not a value without tensors"
    else:
        yield from problems(data[kinds[0]], LITERALS[kinds[0]], place)


def _fact(data: Any, place: str) -> Iterator[str]:
    """Check a fact of an identity: that of a unit names its outputs."""
    if place.partition(".identity.")[2].startswith("unit ") and type(data) is dict:
        yield from problems(data, {"outputs": {OTHERS: str}, OTHERS: object}, place)


def _stored_or_literal(data: Any, place: str) -> Iterator[str]:
    """Check where a value is, or the value."""
    is_stored = type(data) is dict and "at" in data
    yield from problems(data, {"at": HASH} if is_stored else literal, place)


def _repeatable(data: Any, place: str) -> Iterator[str]:
    """Check what `as_repeatable` returns; a plan that is not repeated has nothing."""
    if data != {}:
        yield from problems(data, REPEATABLE, place)


def _largest(data: Any, place: str) -> Iterator[str]:
    """Check the largest sample, if it is known."""
    if data is not None:
        inputs = {OTHERS: {OTHERS: object}}
        yield from problems(data, {"place": str, "inputs": inputs}, place)


LITERALS = MappingProxyType(
    {
        "value": str | int | float | bool | None,
        "list": [literal],
        "record": {OTHERS: literal},
    }
)
# The mark and the sha256, as `Digests.record` returns them.
FILE = (str, str, (int, int, int, int, str))
REPEATABLE = MappingProxyType(
    {
        "config": str,
        "code": str,
        "settled": bool,
        "largest": _largest,
        # Of plans of earlier versions.
        "warnings?": [str],
        "dataset?": str,
    }
)
PROMPT_ROW = MappingProxyType(
    {
        "prompt": str,
        "inputs": [str],
        "branches": [str],
        "sampling": {
            "num_inference_steps": int,
            "guidance_scale": int | float,
            "rand_device": str,
            "sampler?": str,
        },
        "values": {OTHERS: _stored_or_literal},
    }
)
PLAN = MappingProxyType(
    {
        "identity": {
            "family": str,
            "variant": str,
            "task": str,
            "use?": str,
            OTHERS: _fact,
        },
        "about": {
            "dataset": {
                "path": str,
                "sha256": str,
                "rows": int,
                "folders": [str],
                OTHERS: object,
            },
            "columns": [str],
            "inputs": [[str]],
            "components": {OTHERS: str},
            "configs": {OTHERS: {OTHERS: object}},
            "models": {OTHERS: str},
            "files": {OTHERS: [FILE]},
            "versions": {OTHERS: str},
            "prompt_rows": [PROMPT_ROW],
            "config?": {"words?": [str], "folder?": str, OTHERS: object},
            "repeatable?": _repeatable,
            "sizes?": [(str, int, int | float)],
        },
    }
)
