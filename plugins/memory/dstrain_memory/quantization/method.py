"""Declare a way to quantize frozen weights: to keep them in fewer bytes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class QuantizationMethod:
    """A way to quantize the frozen weights of linear layers."""

    name: str
    store: Callable[[nn.Linear, Tensor], nn.Linear]
    """(the layer, its weight (out, in) on its device) -> the layer with the weight
    stored. The first has a bias or None, and a weight that may have no memory. The
    returned layer is frozen, has the same bias, and computes what an `nn.Linear` with
    the restored weight computes; what it stores are parameters, or buffers that no
    state dict has.
    """
    stored_bytes: Callable[[tuple[int, int]], int]
    """(out, in) -> bytes of the stored weight, with its scales."""
    gives_gradient: bool = True
    """Whether a gradient passes through the layer to its input."""
    version: int = 1
    """Raise it when stored weights become other numbers: results that were computed
    with them are then computed again."""

    @property
    def identity(self) -> str:
        """Return its name, with its version unless that is the first."""
        return (
            self.name if self.version == 1 else f"{self.name} (version {self.version})"
        )
