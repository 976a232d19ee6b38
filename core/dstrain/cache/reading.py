"""Read values out of shards that are mapped into memory: one copy, nothing is parsed."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.cache.shards import SUFFIX, advice, data_start
from dstrain.errors import CacheError, SystemFault
from dstrain.storage.columns import NO_FILE

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
