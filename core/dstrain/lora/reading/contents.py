"""What a LoRA file holds for one component, by the network's own names."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dstrain.errors import StateError, first_few
from dstrain.lora.layers import Layer
from dstrain.lora.reading.adapter_config import is_folded


@dataclass(frozen=True)
class MergedLayer:
    """A change of one layer's weight that can only be merged into it."""

    type: str
    """What it is, for errors."""
    change: Callable[[], Tensor]
    """Computes what is added to the weight, in fp32."""

    def changed(self, weight: Tensor) -> Tensor:
        """Return an fp32 weight (out, in) as the layer changes it."""
        return weight + self.change().to(weight.device)


@dataclass(frozen=True)
class Lora:
    """The LoRA of one component."""

    component: str
    layers: Mapping[str, Layer]
    """The layers by the network's own names."""
    header: Mapping[str, str]
    merged: Mapping[str, MergedLayer] = field(default_factory=dict)
    """Changes of layers that can only be merged into their weights."""
    differences: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter -> what is added to it."""

    @property
    def type(self) -> str:
        """Return the type of the layers, or of the first of them; `lora` for none."""
        return next((layer.type for layer in self.layers.values()), "lora")

    @property
    def by_type(self) -> dict[str, dict[str, Layer]]:
        """Return the layers of each type: LyCORIS may give each layer its own."""
        found: dict[str, dict[str, Layer]] = {}
        for name, layer in self.layers.items():
            found.setdefault(layer.type, {})[name] = layer
        return found

    def refuse_merged(self, path: Path, use: str) -> None:
        """Raise StateError if anything in it can only be merged into weights.

        Args:
            path: The file.
            use: What that cannot be, for the error.
        """
        names = [*self.merged, *self.differences]
        if names:
            kinds = {one.type for one in self.merged.values()}
            if self.differences:
                kinds.add("differences of whole weights")
            what = f"contains {' and '.join(sorted(kinds))}, which {use}"
            advice = (
                "--lora (generate) and --preset_lora_path merge it into the weights"
            )
            raise StateError(path, what, f"the first: {first_few(names)}", advice)

    def trained_layers(self, path: Path) -> Mapping[str, Layer]:
        """Return the layers with the alpha that they were trained with, which the header
        records where it is part of B; raises StateError if the header has no valid one.

        Args:
            path: The file.
        """
        text = self.header.get("alpha")
        if text is None or not is_folded(self.header):
            return self.layers
        try:
            others = json.loads(self.header.get("alphas", "{}"))
            alphas = {name: float(others.get(name, text)) for name in self.layers}
        except (ValueError, TypeError, AttributeError, RecursionError):
            alphas = {"": math.nan}
        if not all(0 < alpha < math.inf for alpha in alphas.values()):
            given = self.header.get("alphas", text)
            raise StateError(path, f"its header has no valid alpha: {given!r}")
        return {
            name: layer.with_alpha(alphas[name]) for name, layer in self.layers.items()
        }
