"""Write and read the feature cache: stage 1 fills the folder, stage 2 reads it.

    store.json                   format and version
    shards/NAME.safetensors      values; NAME is the hash of the header, which has a hash of each value
    index/NAME.arrow             where each value is; derived from the shards
    plans/NAME.json              the record of a plan, and
    plans/HASH.arrow             its columns: see `plan_files`
    digests.npy                  remembered digests of files

It is content-addressed and append-only. A file is written under a temporary name, synced
and renamed: that commits it. A reader sees only complete files, takes no lock, and checks
every byte that it uses. A writer holds the lock of the folder.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import Tensor

from dstrain.cache import plan_files
from dstrain.cache.addresses import ABSENT, Addresses, Numbers, as_text, find, packed
from dstrain.cache.index import Index, merged, own_files, read_index, write_index
from dstrain.cache.plan_files import PlanSamples
from dstrain.cache.shards import (
    AGAIN,
    SUFFIX,
    Shard,
    StoredValue,
    advice,
    data_start,
    read_shard,
    write_shard,
)
from dstrain.errors import CacheError, StateError, SystemFault
from dstrain.graph import deserialize
from dstrain.storage import remove_leftovers, write_json
from dstrain.storage.columns import NO_FILE
from dstrain.storage.files import refuse_link

MARKER = "store.json"
DIGESTS = "digests.npy"
LOG = "dstrain.log"
FOLDERS = ("shards", "index", "plans")
PARTS = (MARKER, *FOLDERS, DIGESTS, LOG)
FORMAT = MappingProxyType({"format": "dstrain-features", "version": 3})
KEPT_LAYOUTS = 4096
"""Most layouts of values that are kept parsed."""
OPEN_SHARDS = 256
"""Most shards that are mapped into memory at once; what was learned of others is kept."""


@dataclass
class MappedShards:
    """The shards of a folder, mapped into memory when they are used."""

    folder: Path
    _mapped: dict[str, Tensor] = field(default_factory=dict)
    """The bytes of the shards that were used last."""
    _starts: dict[str, int] = field(default_factory=dict)
    """Where the tensors of each shard begin whose header was verified."""

    def path(self, shard: str) -> Path:
        """Return the path of a shard."""
        return self.folder / f"{shard}{SUFFIX}"

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
            path = self.path(shard)
            raise CacheError(path, "is damaged: it was cut short", advice(path))
        return mapped[start : start + length]

    def _map(self, shard: str) -> Tensor:
        path = self.path(shard)
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
    index: Index = field(default_factory=lambda: merged([]))
    """That on disk, with the values of shards that it does not cover."""
    _verified: Tensor = field(init=False)
    """Shared memory: a byte for each value, 1 once its digest was verified."""
    _files: MappedShards = field(init=False)
    _is_indexed: bool = False
    """Whether the index on disk covers just the shards there are."""
    _layouts: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Bytes, not bits: processes that set two bits of one byte would lose one.
        self._verified = torch.zeros(max(len(self), 1), dtype=torch.uint8)
        self._files = MappedShards(self.folder / "shards")

    @classmethod
    def open(cls, folder: Path) -> "FeatureCache":
        """Read the index, and the headers of shards that it does not cover.

        Raises StateError if this is not a cache, has another version, or is damaged.
        """
        check_is_cache(folder)
        paths = {one.stem: one for one in sorted(folder.glob(f"shards/[!.]*{SUFFIX}"))}
        for path in paths.values():
            refuse_link(path)
        found = read_index(folder / "index", paths.keys())
        covered = () if found is None else found.shards
        rest = [paths[name] for name in sorted(paths.keys() - set(covered))]
        if rest:
            new = cls.of_shards(folder, rest).index
            index = new if found is None else merged([found, new])
        else:
            index = found or merged([])
        cache = cls(folder, index)
        cache._is_indexed = found is not None and not rest
        cache._verified.share_memory_()  # type: ignore[no-untyped-call]
        return cache

    @classmethod
    def of_shards(cls, folder: Path, paths: Iterable[Path]) -> "FeatureCache":
        """Return a cache with the values of only these shards; raises StateError if one
        is damaged.
        """
        return cls(folder, merged([Index.of(read_shard(path)) for path in paths]))

    @staticmethod
    def create(folder: Path) -> None:
        """Create an empty cache if there is none, and remove temporary files of a dead
        run; the caller holds the lock, and has called `check_parts`.
        """
        for part in (folder, *(folder / name for name in FOLDERS)):
            part.mkdir(parents=True, exist_ok=True)
            remove_leftovers(part)
        if not (folder / MARKER).exists():
            write_json(folder / MARKER, dict(FORMAT))

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
            raise CacheError(self._files.path(shard), what, AGAIN) from error

    def write_index(self, is_read: bool = False) -> None:
        """Write the index of all shards, unless it is there; the caller holds the lock.

        `is_read` says whether another process reads the cache, as `index.write_index`
        has it.
        """
        folder = self.folder / "index"
        if not self._is_indexed or (len(own_files(folder)) != 1 and not is_read):
            write_index(folder, self.index, is_read)

    def add(self, shard: Shard) -> None:
        """Note the values of a shard that was committed; numbers change."""
        if shard.name not in self.shards:
            self._is_indexed = False
            self.index = merged([self.index, Index.of(shard)])
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

    def plan_rows(self, path: Path) -> PlanSamples:
        """Return the samples of a plan; raises StateError if they are damaged."""
        record = plan_files.read_record(path)
        return plan_files.open_samples(path.parent, record)


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


def check_is_cache(folder: Path) -> None:
    """Raise StateError if a folder is no feature cache, has another version, or parts that
    are refused.
    """
    if not (folder / MARKER).is_file():
        why = f"{MARKER} not found" if folder.exists() else "it does not exist"
        advice = "name the folder that stage 1 filled with --feature_cache"
        raise CacheError(folder, f"is not a feature cache: {why}", advice)
    check_parts(folder)


def check_parts(folder: Path) -> None:
    """Check the parts that a cache has before it is read, or written to.

    Raises StateError for a link, which would lead outside of the cache, for a marker
    that is damaged, of another version, or of something else, and for a folder whose
    name torch cannot be told.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        advice = "give the folder another name, or another --feature_cache"
        raise StateError(folder, "has a name that is not UTF-8 text", advice) from error
    for name in PARTS:
        refuse_link(folder / name)
    marker = folder / MARKER
    if not marker.exists():
        return
    try:
        found = json.loads(marker.read_bytes())
    except OSError as error:
        raise SystemFault(marker, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CacheError(marker, f"cannot be read: {error}", AGAIN) from error
    if found != FORMAT:
        raise StateError(
            marker,
            f"is that of another format, {found}; this version of dstrain has {dict(FORMAT)}",
            "it is left as it is; fill a new one by running the same command with"
            " --task TASK:data_process --feature_cache NEW_FOLDER",
            "and train with --feature_cache NEW_FOLDER",
        )


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
            folder = self.cache.folder / "shards"
            self.cache.add(write_shard(folder, self._values, self.about))
        self._values = {}
        self._bytes = 0
        self._since = time.monotonic()
