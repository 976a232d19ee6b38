"""Look through a feature cache: its values and its plans, as columns of numbers.

A million values are arrays here, not objects. The commands count, compare and choose
numbers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.addresses import ABSENT, Addresses, Numbers, packed
from dstrain.cache.backend.plan_files import StoredPlan, stored_plans
from dstrain.cache.backend.shards import read_shard, shard_path
from dstrain.cache.in_use import reading
from dstrain.cache.store import FeatureCache, ShardWriter
from dstrain.graph import deserialize

LITERAL = -2
"""Stands for a value that the plan contains itself."""
INPUT = "(input)"
"""Stands for the unit of a value that no unit computes."""


@dataclass(frozen=True)
class PlanContents:
    """A plan, and the number of the value that each sample has under each name, or ABSENT,
    or LITERAL.
    """

    stored: StoredPlan
    rows: Numbers
    """The row of each sample in the table of the dataset, from 0."""
    lines: Numbers
    """The line of each sample in the file of the metadata."""
    values: Mapping[str, Numbers]
    added: Numbers
    """The values of the rows that plugins added."""

    @property
    def used(self) -> Numbers:
        """Return the numbers of the values that the cache stores for this plan, each once."""
        numbers = np.unique(np.concatenate([*self.values.values(), self.added]))
        return numbers[numbers >= 0]

    @property
    def lacks_values(self) -> bool:
        """Return whether the cache lacks one of its values."""
        columns = np.concatenate([*self.values.values(), self.added])
        return bool((columns == ABSENT).any())

    @cached_property
    def units(self) -> Mapping[str, str]:
        """Return the name of each output of the plan's units -> the unit."""
        found: dict[str, str] = {}
        for fact, record in self.stored.identity.items():
            if fact.startswith("unit ") and isinstance(record, dict):
                unit = fact.removeprefix("unit ").split(",")[0].split(" ")[0]
                found |= dict.fromkeys(record["outputs"], unit)
        return found

    def unit_of(self, name: str) -> str:
        """Return the unit whose output a value is: 'negative.prompt_emb' -> 'encode_prompt'."""
        return self.units.get(name.rpartition(".")[2], INPUT)


@dataclass(frozen=True)
class StoredSample:
    """A sample of a plan, whose stored values are read when they are asked for."""

    cache: FeatureCache
    row: int
    """Its row in the table of the dataset, from 0."""
    name: str
    """The row in messages: 'metadata.csv:3'."""
    chunk: int
    """Which part of a long video it is, from 0."""
    literals: Mapping[str, Any]
    """The values that the plan contains itself, by name."""
    stored: Mapping[str, str]
    """Name -> the address of a value."""

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """Return the header of each stored value, which has the shapes of its tensors."""
        return {name: self.cache.header(at) for name, at in self.stored.items()}

    def read(self, name: str) -> Any:
        """Return a stored value; raises StateError if it is damaged or missing."""
        return self.cache.read(self.stored[name])


@dataclass(frozen=True)
class Contents:
    """All values and plans of a feature cache."""

    cache: FeatureCache
    shards: Sequence[Path]
    addresses: Addresses
    shard: Numbers
    """The shard of each value, by its number in `shards`."""
    nbytes: Numbers
    """The bytes of each value's tensors."""
    held: Numbers
    """How many values each shard has, those included that are read from another one."""
    plans: Sequence[PlanContents]

    @classmethod
    def of(cls, folder: Path) -> "Contents":
        """Open a feature cache; raises StateError if it is none, or is damaged."""
        cache = FeatureCache.open(folder)
        shards = [shard_path(folder, name) for name in cache.shards]
        rows = [len(read_shard(path).rows) for path in shards]
        held = np.array(rows, np.int64)
        stored = sorted(stored_plans(folder), key=lambda one: one.sequence)
        plans = [_plan(cache, plan) for plan in stored]
        return cls(
            cache,
            shards,
            cache.index.addresses,
            cache.index.shard.astype(np.int64),
            cache.index.length,
            held,
            plans,
        )

    def samples(
        self, plan: PlanContents, chosen: Iterable[int]
    ) -> Iterator[StoredSample]:
        """Yield the samples of a plan at these numbers."""
        rows = plan.stored.samples()
        info = plan.stored.info
        for index in chosen:
            forms = rows[index]["values"]
            row = int(plan.rows[index])
            yield StoredSample(
                self.cache,
                row,
                info.name_row({"row": row, "line": int(plan.lines[index])}),
                int(rows[index]["chunk"]),
                {
                    name: deserialize(form, {})
                    for name, form in forms.items()
                    if "at" not in form
                },
                {name: form["at"] for name, form in forms.items() if "at" in form},
            )

    def used_by(self, plans: Iterable[PlanContents]) -> NDArray[np.bool_]:
        """Return for each value whether one of these plans uses it."""
        used = np.zeros(len(self.addresses), np.bool_)
        for plan in plans:
            used[plan.used] = True
        return used


@contextmanager
def open_contents(folder: Path) -> Iterator[Contents]:
    """Yield what a feature cache contains; nothing can be removed from it meanwhile.

    Raises StateError if it is no cache, or is damaged, and while something is removed.
    """
    with reading(folder):
        yield Contents.of(folder)


def rewrite_shard(folder: Path, path: Path, kept: Collection[str]) -> None:
    """Replace a shard by one with the values at these addresses, or by none if there are
    none; the caller holds the lock.

    The new one is committed before the old one is removed. Raises StateError if one of
    the values is damaged; nothing was removed then.
    """
    if path not in write_part(folder, path, kept, FeatureCache(folder)):
        path.unlink()


def write_part(
    folder: Path, path: Path, kept: Collection[str], target: FeatureCache
) -> list[Path]:
    """Write the values at these addresses of a shard to another cache, or to the same one;
    return its new shards.

    target: A cache that is open for writing and counts as empty, so that what it has is
        written again.
    """
    if not kept:
        return []
    reader = FeatureCache.of_shards(folder, [path])
    before = set(target.shards)
    writer = ShardWriter(target, read_shard(path).about)
    for address in kept:
        writer.add(address, reader.read(address))
    # It maps the shard, which on Windows could then not be replaced by one of its name.
    del reader
    writer.flush()
    added = sorted(set(target.shards) - before)
    return [shard_path(target.folder, name) for name in added]


def _plan(cache: FeatureCache, plan: StoredPlan) -> PlanContents:
    samples = plan.samples()
    values = {name: np.full(len(samples), LITERAL, np.int64) for name in samples.names}
    for name, addresses in samples.stored.items():
        there = samples.has(name)
        values[name][there] = cache.locate(addresses)[there]
    added = cache.locate(packed(plan.prompt_addresses))
    facts = samples.numbers
    return PlanContents(plan, facts["row"], facts["line"], values, added)
