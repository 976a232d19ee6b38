"""Memory that is given back holds NaN: what still reads weights that are gone gets no
numbers, where it would find the old ones otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from dstrain_memory.ram import WeightsInRam
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

NAN_BYTE = 0xFF
"""A number of any float format is NaN where all its bits are set."""


@dataclass
class Present:
    """What was on the device."""

    loads: int = 0
    most: int = 0
    """Pieces of weights in memory at once, whoever holds them."""
    storages: list[StorageWeakRef] = field(default_factory=list)

    @property
    def now(self) -> int:
        """How many pieces are in memory."""
        return sum(not storage.expired() for storage in self.storages)


@contextmanager
def poisoned_memory() -> Iterator[Present]:
    """Inside, weights in RAM that are dropped from the device are overwritten there."""
    seen = Present()
    load, drop = WeightsInRam.load, WeightsInRam.drop

    def counted_load(self: WeightsInRam) -> Tensor:
        copy = load(self)
        seen.loads += 1
        seen.storages = [one for one in seen.storages if not one.expired()]
        seen.storages.append(StorageWeakRef(copy.untyped_storage()))
        seen.most = max(seen.most, seen.now)
        return copy

    def poisoned_drop(self: WeightsInRam) -> None:
        if self._copy is not None:
            self._copy.fill_(NAN_BYTE)
        drop(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightsInRam, "load", counted_load)
        patch.setattr(WeightsInRam, "drop", poisoned_drop)
        yield seen
