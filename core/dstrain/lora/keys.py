"""The keys of a LoRA file: matrices and alphas by layer; and what its header, or peft's
file beside it, says.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dstrain.errors import StateError
from dstrain.lora.layers import ADAPTER_HEADER

KEY = re.compile(
    r"(?P<layer>.+)\.(?:"
    r"lora_(?P<ab>[AB])(?:\.(?P<adapter>[^.]+))?\.weight|lora[_.](?P<way>down|up)\.weight"
    r"|lora_embedding_(?P<embedding>[AB])|(?P<alpha>alpha))"
)
UNSUPPORTED_KINDS = MappingProxyType(
    {
        "dora_scale": "DoRA",
        "lora_magnitude_vector": "DoRA",
        "hada_w": "LoHa",
        "lokr_w": "LoKr",
        "lora_mid": "LoCon with a core (Tucker decomposition)",
        "oft_": "OFT",
        "diff": "differences of whole weights",
        "diff_b": "differences of biases",
        "set_weight": "whole weights",
        "w_norm": "differences of norms",
        "b_norm": "differences of norms",
        "lora_bias": "LoRA with biases",
        "bias": "LoRA with biases",
    }
)
"""What one of the last parts of a key is, or begins with, in kinds that are not
supported -> how they are called.
"""
HARMLESS_FIELDS = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "peft_version",
        "task_type",
    }
    | {
        "init_lora_weights",
        "lora_dropout",
        "inference_mode",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
    }
)
"""Fields of a peft configuration that are read, or that change nothing once the weights
are loaded.
"""


@dataclass(frozen=True)
class LoraWeights:
    """One layer as a file has it; alpha: its key's, if there is one; named: its keys
    carry an adapter's name.
    """

    down: Tensor
    up: Tensor
    alpha: float | None
    named: bool


@dataclass(frozen=True)
class AdapterConfig:
    """What a peft configuration says: rank and alpha, also by patterns of layers, and
    the ends of layers' names.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def of(self, layer: str) -> tuple[int, float]:
        """Rank and alpha of a layer; a pattern is a name or the end of one."""
        return int(_matching(self.ranks, layer, self.rank)), _matching(
            self.alphas, layer, self.alpha
        )


def parse_keys(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, LoraWeights]:
    """Pair the matrices by layer; raises StateError naming what is incomplete, of
    another kind, or no LoRA at all.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    named: set[str] = set()
    strange: list[str] = []
    for key, tensor in tensors.items():
        hit = KEY.fullmatch(key)
        if hit is None:
            strange.append(key)
            continue
        kind = (
            hit["ab"]
            or hit["embedding"]
            or {"down": "A", "up": "B"}.get(hit["way"] or "", "alpha")
        )
        if parts.setdefault(hit["layer"], {}).setdefault(kind, tensor) is not tensor:
            raise StateError(
                str(path), f"{hit['layer']} is there twice; one of the keys is {key}"
            )
        if hit["adapter"]:
            named.add(hit["layer"])
    if strange or not tensors:
        raise StateError(str(path), *_strange(strange, parts))
    halves = [name for name, found in parts.items() if not {"A", "B"} <= found.keys()]
    if halves:
        what = f"is half a file: {len(halves)} of {len(parts)} layers lack a matrix"
        raise StateError(
            str(path),
            what,
            *(f"{name} has only {', '.join(parts[name])}" for name in halves[:3]),
        )
    for name, found in parts.items():
        matrices = (found["A"], found["B"])
        if not all(
            one.is_floating_point() and one.float().isfinite().all() for one in matrices
        ):
            raise StateError(
                str(path),
                f"{name}: its numbers are not all finite; it would spoil what it is added to",
            )
    return {
        name: LoraWeights(
            found["A"],
            found["B"],
            _alpha(path, name, found.get("alpha")),
            name in named,
        )
        for name, found in parts.items()
    }


def read_adapter_config(
    path: Path, header: Mapping[str, str], prefix: str, peft: bool
) -> AdapterConfig | None:
    """Read the header's configuration of the layers with this prefix, or that of peft's
    file; None if there is none.

    Raises StateError for one that says no rank and alpha, or asks for what would change
    the result.
    """
    place, text = f"header {ADAPTER_HEADER!r}", header.get(ADAPTER_HEADER)
    beside = path.with_name("adapter_config.json")
    if text is None and peft and beside.is_file():
        place, prefix = str(beside), ""
    elif text is None:
        return None
    try:
        fields = json.loads(beside.read_bytes() if text is None else text)
        ours = {
            key.removeprefix(prefix): fields[key]
            for key in fields
            if key.startswith(prefix)
        }
        adapter = _adapter(ours)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OSError,
    ) as error:
        raise StateError(
            str(path), f"{place} tells no rank and alpha of {prefix!r}: {error!r}"
        ) from error
    others = sorted(name for name, value in ours.items() if _matters(name, value))
    if others:
        what = f"needs {', '.join(others)}, which is not supported; loading without would change the result"
        raise StateError(str(path), what)
    return adapter


def _adapter(fields: Mapping[str, Any]) -> AdapterConfig:
    rank, alpha, targets = (
        fields["r"],
        float(fields["lora_alpha"]),
        fields.get("target_modules"),
    )
    if not isinstance(rank, int) or rank < 1 or not math.isfinite(alpha):
        raise ValueError(f"r = {rank!r}, lora_alpha = {alpha!r}")
    ranks = {
        str(name): int(value)
        for name, value in (fields.get("rank_pattern") or {}).items()
    }
    alphas = {
        str(name): float(value)
        for name, value in (fields.get("alpha_pattern") or {}).items()
    }
    ends = tuple(map(str, targets)) if isinstance(targets, list) else ()
    return AdapterConfig(rank, alpha, ends, ranks, alphas)


def _matters(name: str, value: Any) -> bool:
    import peft

    return (
        bool(value)
        and name not in HARMLESS_FIELDS
        and value != peft.LoraConfig().to_dict().get(name)
    )


def _matching(patterns: Mapping[str, float], layer: str, default: float) -> float:
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").replace("\\", "")
        if layer == name or (
            not pattern.startswith("^") and layer.endswith(f".{name}")
        ):
            return value
    return default


def _alpha(path: Path, name: str, tensor: Tensor | None) -> float | None:
    if tensor is None:
        return None
    if tensor.numel() != 1 or not tensor.isfinite().all():
        raise StateError(str(path), f"{name}.alpha is no number")
    return float(tensor.item())


def _strange(keys: Iterable[str], parts: Mapping[str, Any]) -> list[str]:
    """What to say of keys that are no LoRA's."""
    every = list(keys)
    for key in (
        every if parts or not any(key.endswith(".weight") for key in every) else ()
    ):
        for mark, kind in UNSUPPORTED_KINDS.items():
            if any(
                part == mark or (mark[-1] in "_wn" and part.startswith(mark))
                for part in key.split(".")[-3:]
            ):
                return [
                    f"holds {kind}, which is not supported",
                    f"{len(every)} keys, the first is {key}",
                ]
    first = f"the first is {every[0]}" if every else "it has none"
    if not parts:
        return [f"is no LoRA: no key is of a LoRA layer; {first}"]
    return [f"{len(every)} of its keys are of no LoRA layer; {first}"]
