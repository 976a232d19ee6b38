"""What a configuration of another tool says, key by key, and what becomes of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["carried", "changed", "partial", "needless", "missing"]
"""What became of a key.

carried: an option here says the same.
changed: an option here says something near.
partial: an option here says a part of it.
needless: nothing is lost without it.
missing: it has no counterpart, or its value has none.
"""


@dataclass(frozen=True)
class Entry:
    """A key with its value."""

    key: str
    """As the tables of tools have it: `network_dim`, `network.linear`."""
    value: Any
    place: str
    """Where it stands, for people: `train.sh: --network_dim`."""
    is_default: bool = False
    """Whether the tool would have this value without the key."""


@dataclass(frozen=True)
class Result:
    """What becomes of an entry.

    Without options, a note says why nothing is needed, and `lost` what has no counterpart.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    """Our options with their values."""
    note: str = ""
    """What is different here."""
    lost: str = ""
    """Why the value, or a part of it, has no counterpart, and what to do instead."""
    gives_way: tuple[str, ...] = ()
    """Options of which another key may say something else."""

    @property
    def kind(self) -> Kind:
        """Return what became of the entry."""
        if self.lost:
            return "partial" if self.options else "missing"
        if not self.options:
            return "needless"
        return "changed" if self.note else "carried"


class NoCounterpart(Exception):
    """What a conversion raises for a key that is not carried over; says why."""


@dataclass(frozen=True)
class Outcome:
    """An entry and what became of it."""

    entry: Entry
    result: Result

    @classmethod
    def at(cls, place: str, result: Result) -> "Outcome":
        """Return what becomes of something that no table has."""
        return cls(Entry(place.rpartition(" ")[2], None, place), result)


@dataclass(frozen=True)
class Source:
    """A configuration of another tool."""

    tool: str
    """The name of its table, such as `musubi`."""
    run: Sequence[Entry]
    datasets: Sequence[Sequence[Entry]] = ()
    """The keys of each dataset; what holds for several is in each of these."""
    script: str = ""
    """The training script that is run, '' if none is named."""
    files: Sequence[Path] = ()
    """What was read."""
    apart: Sequence[Outcome] = ()
    """What is no key of a run or a dataset, such as a variable of a script."""
