"""Say what the record of a plan has: one that a stranger wrote is refused where it is read,
not half-way through a command.

What it has is that of `plan_identity`, `CacheInfo`, `preview_line` and `as_repeatable`; a
test compares it with records that stage 1 writes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

Check = Callable[[Any, str], Iterator[str]]
"""(JSON data, its place in the record) -> what is wrong with it, in words."""
NO_ENTRIES: Mapping[str, Check] = MappingProxyType({})


def check_record(record: Any) -> None:
    """Raise ValueError, which says what is wrong, unless data is the record of a plan."""
    for problem in PLAN(record, "it"):
        raise ValueError(problem.removeprefix("it."))


def literal(data: Any, place: str) -> Iterator[str]:
    """Yield what is wrong with what `values.serialize` writes of a value without tensors."""
    if not isinstance(data, dict) or len(data) != 1:
        yield f"{place} is not a value"
        return
    ((kind, content),) = data.items()
    if kind not in LITERALS:
        yield f"{place} is not a value without tensors"
        return
    yield from LITERALS[kind](content, place)


def _is(words: str, *types: type, pattern: str = "") -> Check:
    """Return a check of data that has one of these types."""

    def check(data: Any, place: str) -> Iterator[str]:
        # Not isinstance: a bool is an int to Python, but not to JSON.
        fits = type(data) in types
        if not fits or (pattern and not re.fullmatch(pattern, data)):
            yield f"{place} is not {words}"

    return check


def _list_of(item: Check) -> Check:
    """Return a check of a list whose items are all of one kind."""

    def check(data: Any, place: str) -> Iterator[str]:
        if not isinstance(data, list):
            yield f"{place} is not a list"
            return
        for number, one in enumerate(data):
            yield from item(one, f"{place}[{number}]")

    return check


def _items(*kinds: Check) -> Check:
    """Return a check of a list with one item of each kind, in this order."""

    def check(data: Any, place: str) -> Iterator[str]:
        if not isinstance(data, list) or len(data) != len(kinds):
            yield f"{place} is not a list of {len(kinds)}"
            return
        for number, kind in enumerate(kinds):
            yield from kind(data[number], f"{place}[{number}]")

    return check


def _entries(
    required: Mapping[str, Check] = NO_ENTRIES,
    optional: Mapping[str, Check] = NO_ENTRIES,
    others: Check | None = None,
) -> Check:
    """Return a check of entries by name; without `others` there are none of other names."""
    kinds = {**optional, **required}

    def check(data: Any, place: str) -> Iterator[str]:
        if not isinstance(data, dict):
            yield f"{place} has no names"
            return
        for name in required:
            if name not in data:
                yield f"{place} has no {name}"
        for name, entry in data.items():
            kind = kinds.get(name, others)
            if kind is None:
                what = f"{place} has {name[:100]!r}"
                yield f"{what}, which this version of dstrain does not know"
            else:
                yield from kind(entry, f"{place}.{name[:100]}")

    return check


def _or(exception: Any, kind: Check) -> Check:
    """Return a check of data that may be the exception instead."""

    def check(data: Any, place: str) -> Iterator[str]:
        if data != exception:
            yield from kind(data, place)

    return check


def _fact(data: Any, place: str) -> Iterator[str]:
    """Check a fact of an identity: that of a unit names its outputs."""
    if place.partition(".identity.")[2].startswith("unit ") and isinstance(data, dict):
        yield from UNIT(data, place)


def _stored_or_literal(data: Any, place: str) -> Iterator[str]:
    """Check where a value is, or the value."""
    if isinstance(data, dict) and "at" in data:
        yield from STORED(data, place)
    else:
        yield from literal(data, place)


ANY = _is("JSON", str, int, float, bool, list, dict, type(None))
TEXT = _is("a text", str)
NUMBER = _is("a whole number", int)
TEXTS = _list_of(TEXT)
TEXT_BY_NAME = _entries(others=TEXT)
FACTS = _entries(others=ANY)
LITERALS: Mapping[str, Check] = MappingProxyType(
    {
        "value": _is("a plain value", str, int, float, bool, type(None)),
        "list": _list_of(literal),
        "record": _entries(others=literal),
    }
)
STORED = _entries({"at": _is("an address", str, pattern="[0-9a-f]{40}")})
COLUMNS = _is("a name of columns", str, pattern="[0-9a-f]{32}")
UNIT = _entries({"outputs": TEXT_BY_NAME}, others=ANY)
IDENTITY = _entries(
    {"family": TEXT, "variant": TEXT, "task": TEXT}, {"use": TEXT}, _fact
)
DATASET = _entries(
    {"path": TEXT, "sha256": TEXT, "rows": NUMBER, "folders": TEXTS}, others=ANY
)
# The mark and the sha256, as `Digests.record` returns them.
FILE = _items(TEXT, TEXT, _items(NUMBER, NUMBER, NUMBER, NUMBER, TEXT))
SAMPLING = _entries(
    {
        "num_inference_steps": NUMBER,
        "guidance_scale": _is("a number", int, float),
        "rand_device": TEXT,
    }
)
PREVIEW = _entries(
    {
        "prompt": TEXT,
        "inputs": TEXTS,
        "branches": TEXTS,
        "sampling": SAMPLING,
        "values": _entries(others=_stored_or_literal),
    }
)
LARGEST = _entries({"place": TEXT, "inputs": _entries(others=FACTS)})
REPEATABLE = _entries(
    {
        "config": TEXT,
        "code": TEXT,
        "settled": _is("true or false", bool),
        "warnings": TEXTS,
        "largest": _or(None, LARGEST),
    },
    {"dataset": TEXT},
)
ABOUT = _entries(
    {
        "dataset": DATASET,
        "columns": TEXTS,
        "inputs": _list_of(TEXTS),
        "components": TEXT_BY_NAME,
        "configs": _entries(others=FACTS),
        "models": TEXT_BY_NAME,
        "files": _entries(others=_list_of(FILE)),
        "versions": TEXT_BY_NAME,
        "previews": _list_of(PREVIEW),
    },
    {
        "config": FACTS,
        "repeatable": _or({}, REPEATABLE),
        "sizes": _list_of(_items(TEXT, NUMBER, _is("a number", int, float))),
    },
)
PLAN = _entries(
    {
        "identity": IDENTITY,
        "about": ABOUT,
        "columns": _entries(dict.fromkeys(("files", "folders", "samples"), COLUMNS)),
        "sequence": NUMBER,
    }
)
