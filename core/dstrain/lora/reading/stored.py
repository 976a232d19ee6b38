"""The layers of a LoRA file as the file has them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from dstrain.errors import StateError, first_few
from dstrain.installed import how_to_have
from dstrain.lora.layers import Layer
from dstrain.lora.types import LoraType, known_types
from dstrain.registry import disabled_plugins


class StoredLayer(Protocol):
    """One layer as a file has it."""

    @property
    def rank(self) -> int:
        """Return its rank."""

    @property
    def alpha(self) -> float | None:
        """Return the alpha that a key of the layer states, if there is one."""

    @property
    def named(self) -> bool:
        """Return whether its keys are of a program that leaves alpha out where it is the
        rank.
        """

    @property
    def has_product(self) -> bool:
        """Return whether it has a rank, and an alpha that counts."""

    def layer(self, alpha: float) -> Any:
        """Return the layer with an alpha."""


@dataclass(frozen=True)
class StoredParts:
    """A layer of a type, by peft's names of its tensors."""

    type: LoraType
    parts: Mapping[str, Tensor]
    alpha: float | None
    named: bool

    @property
    def rank(self) -> int:
        """Return its rank."""
        return self.layer(None).rank

    @property
    def has_product(self) -> bool:
        """Return True: all types that peft names have an alpha."""
        return True

    def layer(self, alpha: float | None) -> Layer:
        """Return the layer with an alpha; None is the rank."""
        return self.type.layer(self.parts, None, alpha)


def parse_keys(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
    """Return the layers of a file with peft's names, by what comes before the names of
    their parts.

    Raises StateError for keys that are missing or unknown, and for values that are not
    finite numbers.
    """
    types = list(known_types().values())
    patterns = [re.compile(rf"(?P<layer>.+)\.(?P<part>{one.keys})") for one in types]
    found: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, Tensor] = {}
    named: set[str] = set()
    unknown = []
    for key, tensor in tensors.items():
        is_alpha = key.endswith(".alpha")
        has_form = tensor.numel() == 1 if is_alpha else tensor.numel() > 0
        # Where a run is only checked, its own layers have no memory, and no numbers.
        if not has_form or not (
            tensor.is_meta or bool(tensor.float().isfinite().all())
        ):
            kind = "number" if is_alpha else "matrix of numbers"
            raise StateError(path, f"{key} is not a finite {kind}")
        if is_alpha:
            alphas[key.removesuffix(".alpha")] = tensor
            continue
        hit = next((hit for one in patterns if (hit := one.fullmatch(key))), None)
        if hit is None:
            unknown.append(key)
            continue
        found.setdefault(hit["layer"], {})[hit["part"]] = tensor
        if hit.groupdict().get("adapter"):
            named.add(hit["layer"])
    unknown += [f"{name}.alpha" for name in alphas if name not in found]
    if unknown or not found:
        what = f"{len(unknown)} of its {len(tensors)} keys are of no LoRA layer"
        first = f"the first: {first_few(unknown)}" if unknown else "it has no keys"
        advice = (
            "formats of other programs and other types of layers are read by plugins"
        )
        if found_in := how_to_have("lora_files", "others", disabled_plugins()):
            advice = f"{advice}; {found_in}"
        raise StateError(path, what, first, advice)
    layers: dict[str, StoredLayer] = {}
    incomplete = {}
    for name, parts in found.items():
        own = [
            one for one in types if all(re.fullmatch(one.keys, part) for part in parts)
        ]
        alpha = float(alphas[name]) if name in alphas else None
        try:
            if not own:
                raise ValueError("are of several types")
            stored = StoredParts(own[0], parts, alpha, name in named)
            stored.layer(None)
        except ValueError as error:
            incomplete[name] = str(error)
            continue
        layers[name] = stored
    if incomplete:
        why = next(iter(incomplete.values()))
        what = f"incomplete LoRA file: {len(incomplete)} of {len(found)} layers {why}"
        lines = [
            f"{name} has only {', '.join(found[name])}" for name in [*incomplete][:3]
        ]
        raise StateError(path, what, *lines)
    return layers
