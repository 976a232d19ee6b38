"""The index of a feature cache: where each value is, as columns sorted by address.

It is derived from shards, which describe themselves. On disk it is an Arrow file that is
named by the hash of its bytes, and mapped into memory; one that is missing, damaged or
made for other shards is not used, and is made again from the shards.
"""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.addresses import ADDRESS, Addresses, in_order, prefixes
from dstrain.cache.shards import DIGEST, Shard
from dstrain.errors import StateError, SystemFault
from dstrain.storage import write_columns
from dstrain.storage.columns import SUFFIX, open_columns

SHARDS = b"shards"
"""The entry of the file's metadata with the names of the shards, as JSON."""
OWN = re.compile(r"([0-9a-f]{32}|draft)\.arrow")
"""Files of an index, those included that a run left which died while it wrote one."""


@dataclass(frozen=True)
class Index:
    """The values of some shards, each value once."""

    shards: tuple[str, ...]
    """The shards it covers; one whose values others have too has no value here."""
    layouts: Any
    """A `pyarrow.LargeStringArray`: what values have in common, as `StoredValue` has it."""
    addresses: Addresses
    """Sorted; the other columns are in the same order."""
    shard: NDArray[np.int32]
    """The number of its shard."""
    offset: NDArray[np.int64]
    """Where its tensors begin, from the end of the shard's header."""
    length: NDArray[np.int64]
    """The bytes of its tensors."""
    layout: NDArray[np.int32]
    digest: NDArray[np.void]

    @classmethod
    def of(cls, shard: Shard) -> "Index":
        """Return the index of one shard."""
        import pyarrow as pa

        rows = shard.rows
        columns = [np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()]
        addresses, offset, length, layout, digest = columns
        return cls(
            (shard.name,),
            pa.array(shard.layouts, pa.large_string()),
            addresses,
            np.zeros(len(rows), np.int32),
            offset,
            length,
            layout,
            digest,
        )

    @cached_property
    def prefixes(self) -> NDArray[np.uint64]:
        """The beginnings of the addresses, which are searched."""
        return prefixes(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "prefixes"}

    def chosen(self, rows: NDArray[Any]) -> "Index":
        """Return an index with only some of the rows, by number or by condition."""
        columns = ("addresses", "shard", "offset", "length", "layout", "digest")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})


def merged(parts: Sequence[Index]) -> Index:
    """Return an index of all shards of several; of values that are there twice the first
    is used.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    shards: list[str] = []
    shard_numbers = [np.zeros(0, np.int32)]
    for part in parts:
        shard_numbers.append(part.shard + np.int32(len(shards)))
        shards += part.shards
    all_layouts = pa.chunked_array([part.layouts for part in parts], pa.large_string())
    layouts = all_layouts.unique()
    layout_numbers = [np.zeros(0, np.int32)]
    for part in parts:
        numbers = pc.index_in(part.layouts, layouts).to_numpy(zero_copy_only=False)
        layout_numbers.append(numbers.astype(np.int32)[part.layout])

    def joined(name: str, dtype: Any) -> NDArray[Any]:
        columns = [np.zeros(0, dtype), *(getattr(part, name) for part in parts)]
        return np.concatenate(columns)

    everything = Index(
        tuple(shards),
        layouts,
        joined("addresses", ADDRESS),
        np.concatenate(shard_numbers),
        joined("offset", np.int64),
        joined("length", np.int64),
        np.concatenate(layout_numbers),
        joined("digest", DIGEST),
    )
    return everything.chosen(in_order(everything.addresses))


def write_index(folder: Path, index: Index, is_read: bool = False) -> None:
    """Commit an index in its folder, then remove those that were there; the caller holds
    the lock. Raises SystemFault.

    is_read: Whether another process reads the cache. Then the old ones stay until
        the next is written: on a network file system a file that one machine removes
        is gone for another that has it mapped.
    """
    import pyarrow as pa

    def fixed(column: NDArray[np.void]) -> Any:
        width = column.dtype.itemsize
        data = pa.py_buffer(np.ascontiguousarray(column))
        return pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(width), len(column), [None, data]
        )

    columns = {
        "address": fixed(index.addresses),
        "shard": pa.array(index.shard),
        "offset": pa.array(index.offset),
        "length": pa.array(index.length),
        "layout": pa.DictionaryArray.from_arrays(pa.array(index.layout), index.layouts),
        "digest": fixed(index.digest),
    }
    batch = pa.record_batch(columns)
    schema = batch.schema.with_metadata({SHARDS: json.dumps(index.shards)})
    # One batch: each column is one piece of the file, and so one array when it is read.
    name = write_columns(
        folder, schema, [batch.replace_schema_metadata(schema.metadata)]
    )
    for path in own_files(folder):
        if path.name != f"{name}{SUFFIX}" and not is_read:
            path.unlink(missing_ok=True)


def read_index(folder: Path, shards: Collection[str]) -> Index | None:
    """Return the index of a folder whose shards are all still there, mapped into memory;
    None if there is none, or it is damaged.

    shards: The names of the shards there are.
    """
    # Values are only added while older ones are kept: the largest covers most.
    for path in sorted(own_files(folder), key=lambda path: -path.stat().st_size):
        with suppress(StateError, SystemFault):
            table = open_columns(path)
            covered = tuple(json.loads(table.schema.metadata[SHARDS]))
            if set(covered) <= set(shards):
                return _of_table(table, covered)
    return None


def own_files(folder: Path) -> list[Path]:
    """Return the files of an index in a folder."""
    paths = [path for path in sorted(folder.glob("*")) if OWN.fullmatch(path.name)]
    return [path for path in paths if not path.is_symlink()]


def _of_table(table: Any, shards: tuple[str, ...]) -> Index:
    if not len(table):
        # A table without rows has no batch.
        return replace(merged([]), shards=shards)
    (batch,) = table.to_batches()

    def fixed(name: str, dtype: Any) -> NDArray[Any]:
        column = batch.column(name)
        data = np.frombuffer(column.buffers()[1], dtype)
        return data[column.offset : column.offset + len(column)]

    layout = batch.column("layout")
    return Index(
        shards,
        layout.dictionary,
        fixed("address", ADDRESS),
        batch.column("shard").to_numpy(),
        batch.column("offset").to_numpy(),
        batch.column("length").to_numpy(),
        layout.indices.to_numpy(),
        fixed("digest", DIGEST),
    )
