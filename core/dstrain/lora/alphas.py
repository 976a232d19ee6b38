"""Find the alpha of each layer of a LoRA file: in its keys, in its header, in peft's file
beside it, or in what the command says.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.config import LoraFile
from dstrain.console import shell_word
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lazy import import_name
from dstrain.lora.stored import StoredLayer, is_folded
from dstrain.storage import read_limited

ADAPTER_HEADER = "lora_adapter_metadata"
"""The header's entry with rank, alpha and targets, as diffusers reads them."""
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
    }
)
"""Fields of peft's that are read here, or change nothing once weights are loaded."""


@dataclass(frozen=True)
class AdapterConfig:
    """The ranks, alphas and targets of a peft configuration."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Endings of layer names."""
    ranks: Mapping[str, float]
    """Layer name, or the end of one -> rank, where it is not `rank`."""
    alphas: Mapping[str, float]
    """Layer name, or the end of one -> alpha, where it is not `alpha`."""

    def of(self, layer: str) -> tuple[float, float]:
        """Return a layer's rank and alpha."""
        rank = _of_pattern(self.ranks, layer, self.rank)
        return rank, _of_pattern(self.alphas, layer, self.alpha)


def read_adapter_config(
    path: Path,
    header: Mapping[str, str],
    prefix: str,
    peft: bool,
    fields: Mapping[str, Any],
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
        fields: What the configuration says of layers of this type.
    """
    text = header.get(ADAPTER_HEADER)
    place = f"header {ADAPTER_HEADER!r}"
    beside = path.with_name("adapter_config.json")
    # Other programs give their files this name, whatever the keys are.
    is_peft = peft or path.name == PEFT_FILE
    if text is None and not (is_peft and beside.is_file()):
        return None
    try:
        if text is None:
            place, prefix = str(beside), ""
            text = read_limited(beside).decode()
        given = {
            key.removeprefix(prefix): value
            for key, value in dict(json.loads(text)).items()
            if key.startswith(prefix)
        }
        rank, alpha = given["r"], float(given["lora_alpha"])
        if not isinstance(rank, int) or rank < 1 or not math.isfinite(alpha):
            raise ValueError(f"r = {rank!r}, lora_alpha = {alpha!r}")
        targets = given.get("target_modules")
        if not isinstance(targets, list):
            targets = ()  # peft's regular expressions and shorthands name no layers
        ranks, alphas = (
            {key: float(value) for key, value in (given.get(name) or {}).items()}
            for name in ("rank_pattern", "alpha_pattern")
        )
    except Exception as error:  # a damaged one may be anything
        what = f"{place} has no valid rank and alpha for {prefix!r}: {error!r}"
        raise StateError(path, what) from error
    defaults = import_name("peft", "LoraConfig")().to_dict() | fields
    others = [
        name
        for name, value in sorted(given.items())
        if value and name not in HARMLESS_FIELDS and value != defaults.get(name)
    ]
    if others:
        what = f"needs {', '.join(others)}, which is not supported; ignoring it would change the result"
        raise StateError(path, what)
    return AdapterConfig(rank, alpha, tuple(map(str, targets)), ranks, alphas)


def _of_pattern(patterns: Mapping[str, float], layer: str, default: float) -> float:
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").replace("\\", "")
        is_ending = not pattern.startswith("^") and layer.endswith(f".{name}")
        if layer == name or is_ending:
            return value
    return default


def alphas_of(
    layers: Mapping[str, StoredLayer],
    file: LoraFile,
    header: Mapping[str, str],
    adapter: AdapterConfig | None,
    means_rank: Callable[[], bool],
) -> dict[str, float]:
    """Return each layer's alpha.

    Raises StateError for a file that does not state it, and UsageError for an alpha that
    is given of one that does.

    Args:
        layers: The layers by name.
        file: The file, with the alpha that is given of it.
        header: The file's header.
        adapter: What peft's configuration says.
        means_rank: Says whether a file with such names means the rank where it states none.
    """
    ranks = {name: float(one.rank) for name, one in layers.items()}
    counted = [name for name, one in layers.items() if one.has_alpha]
    stated = {}
    for name in counted:
        alpha = layers[name].alpha
        if adapter is not None:
            rank, said = adapter.of(name)
            alpha = said if alpha is None else alpha
            if ranks[name] != rank or not math.isclose(alpha, said, rel_tol=1e-6):
                what = f"its header says rank {rank:g} and alpha {said:g} of {name}, "
                what += f"which has rank {ranks[name]:g} and alpha {alpha:g}"
                raise StateError(file.path, what)
        if alpha is not None:
            stated[name] = alpha
    without = [name for name in counted if name not in stated]
    if stated and without:
        what = f"incomplete LoRA file: {len(without)} of {len(counted)} layers lack an alpha"
        raise StateError(file.path, what, f"the first: {first_few(without)}")
    states = not without or is_folded(header)
    if states and file.alpha is not None:
        what = f"has no effect: {file.path} states its own alpha, or needs none"
        raise UsageError("--alpha", what, "leave it, or @alpha, out")
    if not states and file.alpha is None and not means_rank():
        typed = shell_word(replace(file, alpha="rank").typed)
        what = "states no alpha: in `.alpha` keys, in adapter_config.json beside it, or in "
        what += f"{ADAPTER_HEADER!r} of its header; programs differ in what they assume"
        advice = f"if it is the rank, say so where the file is named: {typed}"
        raise StateError(file.path, what, advice)
    if file.alpha is None or file.alpha == "rank":
        return ranks | stated
    return ranks | dict.fromkeys(counted, file.alpha)
