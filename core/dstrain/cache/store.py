"""Write and read the values of a feature cache: stage 1 fills it, stage 2 reads it.

It is content-addressed and append-only. A file is written under a temporary name, synced
and renamed: that commits it. A reader sees only complete files, takes no lock, and checks
every byte that it uses. A writer holds the lock of the folder. What the files are, only
`shards`, `index` and `plan_files` know.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from dstrain.cache.addresses import ABSENT, Addresses, Numbers, as_text, find, packed
from dstrain.cache.backend.index import Index, check_is_cache
from dstrain.cache.backend.shards import (
    AGAIN,
    Shard,
    StoredValue,
    advice,
    data_start,
    read_shard,
    shard_path,
    shard_paths,
    write_shard,
)
from dstrain.cache.in_use import readers
from dstrain.errors import CacheError, SystemFault
from dstrain.graph import deserialize
from dstrain.storage.columns import NO_FILE
from dstrain.storage.files import refuse_link

KEPT_LAYOUTS = 4096
"""Most layouts of values that are kept parsed."""


OPEN_SHARDS = 256
"""Most shards that are mapped into memory at once; what was learned of others is kept."""


@dataclass
class MappedShards:
    """The shards of a cache, mapped into memory when they are used."""

    folder: Path
    _mapped: dict[str, Tensor] = field(default_factory=dict)
    """The bytes of the shards that were used last."""
    _starts: dict[str, int] = field(default_factory=dict)
    """Where the tensors of each shard begin whose header was verified."""

    def stored(self, shard: str, offset: int, length: int) -> Tensor:
        """Return bytes of a shard, by their place behind its header, as mapped memory.

        The header is verified at the first time. Raises StateError if the shard is
        damaged, cut short or missing; SystemFault if it cannot be read.
        """
        mapped = self._mapped.get(shard)
        if mapped is None:
            mapped = self._map(shard)
        start = self._starts[shard] + offset
        if start + length > len(mapped):
            path = shard_path(self.folder, shard)
            raise CacheError(path, "is damaged: it was cut short", advice(path))
        return mapped[start : start + length]

    def _map(self, shard: str) -> Tensor:
        path = shard_path(self.folder, shard)
        if shard not in self._starts:
            self._starts[shard] = data_start(path)
        if len(self._mapped) >= OPEN_SHARDS:
            self._mapped.pop(next(iter(self._mapped)))
        try:
            # By Python first, whose errors tell a file that is gone from a fault.
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
            # Private, for a file that may not be written; no file stays open.
            mapped = torch.from_file(
                str(path), shared=False, size=size, dtype=torch.uint8
            )
        except NO_FILE as error:
            what = f"cannot be read: {error}"
            raise CacheError(path, what, advice(path)) from error
        except OSError as error:
            raise SystemFault(path, f"cannot be read: {error.strerror}") from error
        except RuntimeError as error:
            # The system has no more memory to map, or no more files to open.
            what = f"cannot be mapped into memory: {str(error).splitlines()[0]}"
            raise SystemFault(path, what) from error
        self._mapped[shard] = mapped
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes map the shards themselves.
        return {**vars(self), "_mapped": {}}


@dataclass
class FeatureCache:
    """A feature cache that is open for reading.

    Each value has a number, which is good until values are added. Processes that load
    samples share one note of which values were verified.
    """

    folder: Path
    index: Index = field(default_factory=lambda: Index.merged([]))
    """The index on disk, with the values of shards that it does not cover."""
    _verified: Tensor = field(init=False)
    """Shared memory: a byte for each value, 1 once its digest was verified."""
    _files: MappedShards = field(init=False)
    _is_indexed: bool = False
    """Whether the index on disk covers just the shards there are."""
    _layouts: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Bytes, not bits: processes that set two bits of one byte would lose one.
        self._verified = torch.zeros(max(len(self), 1), dtype=torch.uint8)
        self._files = MappedShards(self.folder)

    @classmethod
    def open(cls, folder: Path) -> "FeatureCache":
        """Read the index, and the headers of shards that it does not cover.

        Raises StateError if this is not a cache, has another version, or is damaged.
        """
        check_is_cache(folder)
        paths = {one.stem: one for one in shard_paths(folder)}
        for path in paths.values():
            refuse_link(path)
        found = Index.read(folder, paths.keys())
        covered = () if found is None else found.shards
        rest = [paths[name] for name in sorted(paths.keys() - set(covered))]
        if rest:
            new = cls.of_shards(folder, rest).index
            index = new if found is None else Index.merged([found, new])
        else:
            index = found or Index.merged([])
        cache = cls(folder, index)
        cache._is_indexed = found is not None and not rest
        cache._verified.share_memory_()  # type: ignore[no-untyped-call]  # of torch
        return cache

    @classmethod
    def of_shards(cls, folder: Path, paths: Iterable[Path]) -> "FeatureCache":
        """Return a cache with the values of only these shards; raises StateError if one
        is damaged.
        """
        return cls(folder, Index.merged([Index.of(read_shard(path)) for path in paths]))

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[str]:
        return map(as_text, self.index.addresses)

    def __contains__(self, address: str) -> bool:
        return self._number(address) != ABSENT

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the shards."""
        return self.index.shards

    def locate(self, addresses: Addresses) -> Numbers:
        """Return the number of the value at each address, ABSENT where there is none."""
        return find(addresses, self.index.addresses, self.index.prefixes)

    def header(self, address: str) -> Any:
        """Return the header of a value, which has the shapes of its tensors."""
        return self._layout(self._required(address))["header"]

    def read(self, address: str) -> Any:
        """Return a value, its tensors copies of their own.

        Its digest is verified at the first read. Raises StateError if it is damaged or
        missing.
        """
        return self.read_at(self._required(address))

    def read_at(self, number: int) -> Any:
        """Return the value of a number, as `read` does."""
        index = self.index
        shard = index.shards[index.shard[number]]
        stored = self._files.stored(
            shard, int(index.offset[number]), int(index.length[number])
        )
        try:
            if not self._verified[number]:
                self._verify(number, stored)
            layout = self._layout(number)
            tensors = copies(stored, layout["tensors"])
            return deserialize(layout["header"], tensors)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"is damaged: value {as_text(index.addresses[number])}: {error}"
            raise CacheError(shard_path(self.folder, shard), what, AGAIN) from error

    def write_index(self) -> None:
        """Write the index of all shards, unless it is there; the caller holds the lock."""
        self.index.write(self.folder, bool(readers(self.folder)), self._is_indexed)

    def add(self, shard: Shard) -> None:
        """Note the values of a shard that was committed; numbers change."""
        if shard.name not in self.shards:
            self._is_indexed = False
            self.index = Index.merged([self.index, Index.of(shard)])
            self._layouts.clear()
            self._verified = torch.zeros(max(len(self), 1), dtype=torch.uint8)

    def _number(self, address: str) -> int:
        try:
            return int(self.locate(packed([address]))[0])
        except ValueError:  # not the text of an address
            return ABSENT

    def _required(self, address: str) -> int:
        number = self._number(address)
        if number == ABSENT:
            raise CacheError(self.folder, f"lacks value {address}")
        return number

    def _layout(self, number: int) -> Any:
        """Return the parsed layout of a value; most values have one in common."""
        key = int(self.index.layout[number])
        if key not in self._layouts:
            if len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = json.loads(self.index.layouts[key].as_py())
        return self._layouts[key]

    def _verify(self, number: int, stored: Tensor) -> None:
        layout = self.index.layouts[int(self.index.layout[number])].as_py()
        digest = xxhash.xxh3_128(layout.encode())
        digest.update(stored.numpy().data)
        if digest.digest() != self.index.digest[number].tobytes():
            raise ValueError("its digest is not the recorded one")
        self._verified[number] = 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layouts": {}}


def copies(stored: Tensor, entries: Iterable[Any]) -> dict[str, Tensor]:
    """Return the tensors of a value by name, copied out of mapped memory.

    entries: Name, dtype and shape of each, as `StoredValue.layout` has them. Raises
    ValueError or RuntimeError if they have another size than what is stored.
    """
    tensors = {}
    start = 0
    for name, dtype_name, shape in entries:
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        part = stored[start:end].view(dtype).view(shape)
        try:
            tensors[name] = part.clone()
        except RuntimeError as error:
            # So torch says that there is no memory; it is no damage.
            raise MemoryError(str(error).splitlines()[0]) from error
        start = end
    if start != len(stored):
        raise ValueError("its tensors have other sizes")
    return tensors


@dataclass
class ShardWriter:
    """A writer that collects values and commits a shard when it is large or old enough."""

    cache: FeatureCache
    about: Mapping[str, str]
    """Recorded in each shard."""
    max_bytes: int = 256 * 2**20
    max_seconds: float = 60.0
    _values: dict[str, StoredValue] = field(default_factory=dict)
    _bytes: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, address: str, value: Any) -> None:
        """Add a value to the shard in progress, unless it is there or already stored."""
        if address in self._values or address in self.cache:
            return
        stored = StoredValue.of(value, address)
        self._values[address] = stored
        self._bytes += stored.nbytes
        age = time.monotonic() - self._since
        if self._bytes >= self.max_bytes or age >= self.max_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit the shard in progress."""
        if self._values:
            self.cache.add(write_shard(self.cache.folder, self._values, self.about))
        self._values = {}
        self._bytes = 0
        self._since = time.monotonic()
