"""The layers of a LoRA file as the file has them, and what it holds for one component."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dstrain.errors import StateError, first_few
from dstrain.installed import how_to_have
from dstrain.lora.layers import Change, Layer
from dstrain.lora.types import LoraType, known_types, type_of
from dstrain.registry import disabled_plugins

FOLDED = MappingProxyType({"scale": "in lora_B"})
"""The header's entry in files that dstrain writes: alpha / rank is part of B."""


def is_folded(header: Mapping[str, str]) -> bool:
    """Return whether alpha / rank is part of B, by the header of a file."""
    return header.items() >= FOLDED.items()


@dataclass(frozen=True)
class StoredLayer:
    """A layer of a type, by peft's names of its tensors."""

    type: LoraType
    parts: Mapping[str, Tensor]
    alpha: float | None = None
    """What a key of the layer states, if there is one."""

    @property
    def rank(self) -> int:
        """Return its rank."""
        return self.layer(None).rank

    @property
    def has_alpha(self) -> bool:
        """Return whether its alpha counts."""
        with self.type.naming:
            return self.type.has_alpha(self.parts)

    def layer(self, alpha: float | None) -> Layer:
        """Return the layer with an alpha; None is the rank."""
        return self.type.layer(self.parts, None, alpha)


def parse_keys(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
    """Return the layers of a file with peft's names, by what comes before the names of
    their parts.

    Raises StateError for keys that are missing or unknown, and for values that are not
    finite numbers.
    """
    types = known_types().values()
    patterns = [re.compile(rf"(?P<layer>.+)\.(?P<part>{one.keys})") for one in types]
    found: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in tensors.items():
        is_alpha = key.endswith(".alpha")
        is_matrix = tensor.is_floating_point() and tensor.numel() > 0
        has_form = tensor.numel() == 1 if is_alpha else is_matrix
        # Where a run is only checked, its own layers have no memory, and no numbers.
        if not has_form or not (
            tensor.is_meta or bool(tensor.float().isfinite().all())
        ):
            kind = "number" if is_alpha else "matrix of numbers"
            raise StateError(path, f"{key} is not a finite {kind}")
        hit = next((hit for one in patterns if (hit := one.fullmatch(key))), None)
        if is_alpha:
            alphas[key.removesuffix(".alpha")] = tensor
        elif hit is None:
            unknown.append(key)
        else:
            found.setdefault(hit["layer"], {})[hit["part"]] = tensor
    unknown += [f"{name}.alpha" for name in alphas if name not in found]
    if unknown or not found:
        what = f"{len(unknown)} of its {len(tensors)} keys are of no LoRA layer"
        first = f"the first: {first_few(unknown)}" if unknown else "it has no keys"
        advice = how_to_have("lora_files", "others", disabled_plugins())
        raise StateError(path, what, first, *filter(None, [advice]))
    layers = {}
    incomplete = {}
    for name, parts in found.items():
        alpha = float(alphas[name]) if name in alphas else None
        try:
            layers[name] = StoredLayer(type_of(parts), parts, alpha)
            layers[name].layer(None)
        except ValueError as error:
            incomplete[name] = str(error)
    if incomplete:
        why = next(iter(incomplete.values()))
        what = f"incomplete LoRA file: {len(incomplete)} of {len(found)} layers {why}"
        shown = [*incomplete][:3]
        lines = [f"{name} has only {', '.join(found[name])}" for name in shown]
        raise StateError(path, what, *lines)
    return layers


@dataclass(frozen=True)
class Lora:
    """The LoRA of one component."""

    component: str
    layers: Mapping[str, Layer]
    """The layers by the network's own names."""
    header: Mapping[str, str]
    merged: Mapping[str, Change] = field(default_factory=dict)
    """Parameter -> a change of it that can only be merged into it."""

    @property
    def type(self) -> str:
        """Return the type of the layers, or of the first of them; `lora` for none."""
        return next((layer.type for layer in self.layers.values()), "lora")

    @property
    def by_type(self) -> dict[str, dict[str, Layer]]:
        """Return the layers of each type: some programs give each layer its own."""
        found: dict[str, dict[str, Layer]] = {}
        for name, layer in self.layers.items():
            found.setdefault(layer.type, {})[name] = layer
        return found

    def refuse_merged(self, path: Path, use: str) -> None:
        """Raise StateError, with what it cannot be used for, if anything in it can only be
        merged into weights.
        """
        if self.merged:
            kinds = " and ".join(sorted({one.type for one in self.merged.values()}))
            advice = "--lora (generate) and --preset_lora_path merge it into weights"
            first = f"the first: {first_few(self.merged)}"
            raise StateError(path, f"contains {kinds}, which {use}", first, advice)

    def trained_layers(self, path: Path) -> Mapping[str, Layer]:
        """Return the layers with the alpha that they were trained with, which the header
        records where it is part of B; raises StateError if the header has no valid one.
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
        layers = self.layers.items()
        return {name: layer.with_alpha(alphas[name]) for name, layer in layers}
