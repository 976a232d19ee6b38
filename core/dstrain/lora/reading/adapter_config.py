"""Read the ranks and alphas that a LoRA file's header, or peft's file beside it, states."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.errors import StateError
from dstrain.lazy import import_name
from dstrain.storage import read_limited

ADAPTER_HEADER = "lora_adapter_metadata"
"""The header's entry with rank, alpha and targets, as diffusers reads them."""
FOLDED = MappingProxyType({"scale": "in lora_B"})
"""The header's entry in files that dstrain writes: alpha / rank is part of B."""
PEFT_FILE = "adapter_model.safetensors"
"""The name of peft's own files."""
HARMLESS_FIELDS = frozenset(
    {
        "r",
        "lora_alpha",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "peft_version",
        "task_type",
        "init_lora_weights",
        "lora_dropout",
        "inference_mode",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "use_dora",
    }
)
"""Fields of a peft configuration that are read here, or that change nothing once the
weights are loaded.
"""


@dataclass(frozen=True)
class AdapterConfig:
    """The ranks, alphas and targets of a peft configuration."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Endings of layer names."""
    ranks: Mapping[str, int]
    """Layer name, or the end of one -> rank, where it is not `rank`."""
    alphas: Mapping[str, float]
    """Layer name, or the end of one -> alpha, where it is not `alpha`."""
    dora: bool = False

    def of(self, layer: str) -> tuple[float, float]:
        """Return a layer's rank and alpha."""
        rank = _of_pattern(self.ranks, layer, self.rank)
        return rank, _of_pattern(self.alphas, layer, self.alpha)


def is_folded(header: Mapping[str, str]) -> bool:
    """Return whether alpha / rank is part of B, by the header of a file."""
    return header.items() >= FOLDED.items()


def is_of_ai_toolkit(header: Mapping[str, str]) -> bool:
    """Return whether ai-toolkit wrote a file (toolkit/metadata.py of ostris/ai-toolkit):
    in its names of diffusers alpha is always the rank, and left out.
    """
    try:
        return bool(json.loads(header.get("software", "{}"))["name"] == "ai-toolkit")
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def read_adapter_config(
    path: Path,
    header: Mapping[str, str],
    prefix: str,
    peft: bool,
) -> AdapterConfig | None:
    """Read the configuration of the layers with this prefix from the header, else from
    peft's file beside the LoRA; None if there is none.

    Raises StateError for one without rank and alpha, or with settings that would change
    the result.

    Args:
        path: The LoRA file.
        header: Its header.
        prefix: What the configuration's fields begin with in the header.
        peft: Whether the keys begin as in peft's own files; a file with the name of
            these is one, too.
    """
    text = header.get(ADAPTER_HEADER)
    place = f"header {ADAPTER_HEADER!r}"
    beside = path.with_name("adapter_config.json")
    # diffusion-pipe writes ComfyUI's keys into a file with peft's name.
    is_peft = peft or path.name == PEFT_FILE
    if text is None and not (is_peft and beside.is_file()):
        return None
    try:
        if text is None:
            place = str(beside)
            prefix = ""
            text = read_limited(beside).decode()
        fields = {
            key.removeprefix(prefix): value
            for key, value in dict(json.loads(text)).items()
            if key.startswith(prefix)
        }
        adapter = _adapter(fields)
    except Exception as error:  # a damaged one may be anything
        what = f"{place} has no valid rank and alpha for {prefix!r}: {error!r}"
        raise StateError(path, what) from error
    defaults = import_name("peft", "LoraConfig")().to_dict()
    others = []
    for name, value in sorted(fields.items()):
        if value and name not in HARMLESS_FIELDS and value != defaults.get(name):
            others.append(name)
    if others:
        what = f"needs {', '.join(others)}, which is not supported; ignoring it would change the result"
        raise StateError(path, what)
    return adapter


def _adapter(fields: Mapping[str, Any]) -> AdapterConfig:
    rank = fields["r"]
    alpha = float(fields["lora_alpha"])
    if not isinstance(rank, int) or rank < 1 or not math.isfinite(alpha):
        raise ValueError(f"r = {rank!r}, lora_alpha = {alpha!r}")
    targets = fields.get("target_modules")
    if not isinstance(targets, list):
        targets = ()  # peft's regular expressions and shorthands name no layers
    ranks = fields.get("rank_pattern") or {}
    alphas = fields.get("alpha_pattern") or {}
    return AdapterConfig(
        rank,
        alpha,
        targets=tuple(map(str, targets)),
        ranks={name: int(value) for name, value in ranks.items()},
        alphas={name: float(value) for name, value in alphas.items()},
        dora=bool(fields.get("use_dora")),
    )


def _of_pattern(
    patterns: Mapping[str, float],
    layer: str,
    default: float,
) -> float:
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").replace("\\", "")
        is_ending = not pattern.startswith("^") and layer.endswith(f".{name}")
        if layer == name or is_ending:
            return value
    return default
