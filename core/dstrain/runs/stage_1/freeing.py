"""Free what stage 1 loaded, and see that it is gone, before stage 2 loads what is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dstrain.config import as_size
from dstrain.console import get_logger
from dstrain.errors import first_few
from dstrain.training import collect_memory

logger = get_logger(__name__)

Storages = Mapping[StorageWeakRef, int]
"""Storages, by references that keep none of them in memory -> their bytes."""


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of components, by references that do not keep them in memory."""

    storages: Mapping[str, Storages]
    """Component -> its storages: a parameter may be gone while a view keeps its bytes."""

    @classmethod
    def of(cls, components: Mapping[str, Any]) -> "LoadedWeights":
        """Refer to the weights and buffers of these components that are networks."""
        storages = {
            name: _storages(network)
            for name, network in components.items()
            if isinstance(network, nn.Module)
        }
        return cls(storages)

    def in_memory(self) -> dict[str, int]:
        """Return component -> bytes of its weights that something keeps in memory."""
        left = {}
        for name, storages in self.storages.items():
            kept = sum(size for one, size in storages.items() if _is_kept(one))
            if kept:
                left[name] = kept
        return left

    def free(self) -> None:
        """Collect what nothing uses any more, and say how much of the weights is gone.

        A warning names the components that something still keeps: code of a plugin.
        """
        collect_memory()
        total = sum(sum(one.values()) for one in self.storages.values())
        left = self.in_memory()
        freed = as_size(total - sum(left.values()))
        line = f"encoders freed: {freed} of {as_size(total)}"
        if left:
            names = first_few(left)
            logger.warning(f"{line}; something keeps weights of {names} in memory")
        else:
            logger.info(line)


def _storages(network: nn.Module) -> Storages:
    tensors = [*network.parameters(), *network.buffers()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {_reference(one): one.nbytes() for one in storages}


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's are untyped


def _is_kept(storage: StorageWeakRef) -> bool:
    return not storage.expired()  # type: ignore[no-untyped-call]
