"""Say which values have a part that stands for something else, such as a variable."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dstrain_tools.importing.entries import Entry, Outcome, Result, Source
from dstrain_tools.importing.reading.shell import (
    BATCH_VARIABLE,
    HOME_MARK,
    OUTPUT,
    VARIABLE,
)

IN_SCRIPTS = (VARIABLE, BATCH_VARIABLE, OUTPUT)
IN_DATA = (re.compile(r"\$\{?[A-Z_]{2,}\}?"), re.compile(r"%[A-Z_]{2,}%"))
"""Only what looks like a variable of the system: a prompt may be about $5."""
DATA = (".toml", ".yaml", ".yml", ".json")


def unset(source: Source) -> Iterator[Outcome]:
    """Yield what only a shell gives a value, for each key that has such a part."""
    entries = {
        entry.place: entry for entry in chain(source.run, *source.datasets)
    }.values()
    for entry in entries:
        file, _, key = entry.place.partition(": ")
        for name, why in _parts(entry, is_script=Path(file).suffix.lower() not in DATA):
            yield Outcome.at(f"{file}: {name}", Result(lost=f"{key} {why}"))


def _parts(entry: Entry, is_script: bool) -> Iterator[tuple[str, str]]:
    """Yield each part of a value with what is wrong with it."""
    words = entry.value if isinstance(entry.value, list | tuple) else [entry.value]
    for word in words:
        if not isinstance(word, str):
            continue
        if re.match(rf"{HOME_MARK}($|[/\\])", word):
            why = "means the home folder only to a shell, and only without quotes"
            yield HOME_MARK, f"begins with {HOME_MARK}, which {why}: write the path out"
        for pattern in IN_SCRIPTS if is_script else IN_DATA:
            for match in pattern.finditer(word):
                who = "the script does not set" if is_script else "nothing here sets"
                yield match[0], f"has {match[0]}, which {who}: write its value there"
