"""Parse the keys of a LoRA file, and read the rank and alpha that its header, or peft's
file beside it, states.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dstrain.errors import StateError, first_few
from dstrain.lazy import import_name
from dstrain.lora.foreign.differences import DIFFERENCE
from dstrain.lora.foreign.products import LohaWeights, parse_loha
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import LokrWeights, parse_lokr
from dstrain.storage import read_limited

ADAPTER_HEADER = "lora_adapter_metadata"
"""The header's entry with rank, alpha and targets, as diffusers reads them."""
FOLDED = MappingProxyType({"scale": "in lora_B"})
"""The header's entry in files that dstrain writes: alpha / rank is part of B."""
KEY = re.compile(
    r"(?P<layer>.+)\.(?:"
    r"lora_(?P<ab>[AB])(?:\.(?P<adapter>[^.]+))?\.weight|lora[_.](?P<way>down|up)\.weight"
    r"|lora_embedding_(?P<embedding>[AB])|alpha|(?:lora_magnitude_vector"
    r"(?:\.(?P<vector>(?!weight$)[^.]+))?(?:\.weight)?|dora_scale)(?P<length>)"
    # XLabs: a layer is called `qkv_lora1`, and its matrices `down` and `up`.
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))(?P<own>down|up)\.weight)"
)
PRODUCT = re.compile(r"(?P<layer>.+)\.(?P<kind>lokr|hada)_.+")
"""A matrix of LoKr or LoHa."""
MATRICES = MappingProxyType({"A": "A", "B": "B", "down": "A", "up": "B"})
"""What a key calls a matrix -> which it is."""
LENGTHS = "the lengths of DoRA"
"""What errors call them."""
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
class LoraWeights:
    """One layer as a file has it."""

    down: Tensor
    up: Tensor
    alpha: float | None
    """The value of its alpha key, if there is one."""
    named: bool
    """Whether its keys contain the name of an adapter, or are XLabs' own: where these
    are, alpha is the rank.
    """
    magnitude: Tensor | None = None
    """(out,): of DoRA, the lengths of the rows of the changed weight."""

    @property
    def rank(self) -> int:
        """Return the number of rows of `down`."""
        return len(self.down)

    @property
    def has_product(self) -> bool:
        """Return whether it has a rank, and an alpha that counts: always."""
        return True

    def layer(self, alpha: float) -> LoraLayer:
        """Return the layer with an alpha."""
        return LoraLayer(self.down, self.up, alpha, self.magnitude)


Weights = LoraWeights | LokrWeights | LohaWeights


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


def is_lora_key(key: str) -> bool:
    """Return whether a key is that of a matrix of LoRA; an alpha may be a network's own."""
    found = KEY.fullmatch(key)
    return bool(found and _matrix_in(found)) or ".lokr_" in key or ".hada_" in key


def _matrix_in(found: re.Match[str]) -> str:
    """Return what a key calls its matrix; '' for one of something else."""
    return found["ab"] or found["way"] or found["embedding"] or found["own"] or ""


def is_key_of_lora_file(key: str) -> bool:
    """Return whether a key may be one of a LoRA file, as an alpha or a difference of a
    whole parameter is.
    """
    found = KEY.fullmatch(key) or DIFFERENCE.fullmatch(key)
    return found is not None or is_lora_key(key)


def parse_keys(path: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Weights]:
    """Return the matrices by layer, those of LoKr and LoHa too.

    Raises StateError as `parse_pairs`, `parse_lokr` and `parse_loha` do.
    """
    hits = {key: PRODUCT.fullmatch(key) for key in tensors}
    kind_of = {hit["layer"]: hit["kind"] for hit in hits.values() if hit}
    kinds: dict[str, dict[str, Tensor]] = {"lokr": {}, "hada": {}, "": {}}
    for key, tensor in tensors.items():
        hit = hits[key]
        # An alpha is one of the layer that it is of.
        layer = hit["layer"] if hit else key.rpartition(".")[0]
        kinds[kind_of.get(layer, "")][key] = tensor
    found: dict[str, Weights] = {}
    if kinds["lokr"]:
        found |= parse_lokr(path, kinds["lokr"])
    if kinds["hada"]:
        found |= parse_loha(path, kinds["hada"])
    if kinds[""] or not found:
        found |= parse_pairs(path, kinds[""])
    return found


def parse_pairs(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, LoraWeights]:
    """Pair the matrices by layer.

    Raises StateError for keys that are missing, duplicate, unknown or of another kind
    of file, and for values that are not finite numbers.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    named: set[str] = set()
    unknown: list[str] = []
    for key, tensor in tensors.items():
        hit = KEY.fullmatch(key)
        if hit is None:
            unknown.append(key)
            continue
        name = hit["layer"]
        part = MATRICES.get(_matrix_in(hit), "alpha")
        if hit["length"] is not None:
            part = LENGTHS
        if part in parts.setdefault(name, {}):
            raise StateError(path, f"contains {name} twice; one of its keys is {key}")
        # Where a run is only checked, its own layers have no memory, and no numbers.
        is_finite = tensor.is_meta or bool(tensor.float().isfinite().all())
        if not (_has_form(part, tensor) and is_finite):
            kinds = {"alpha": "number", LENGTHS: "vector of numbers"}
            kind = kinds.get(part, "matrix of numbers")
            raise StateError(path, f"{key} is not a finite {kind}")
        parts[name][part] = tensor
        if hit["adapter"] or hit["vector"] or hit["own"]:
            named.add(name)
    if unknown or not parts:
        what = f"{len(unknown)} of its {len(tensors)} keys are of no LoRA layer"
        first = f"the first: {first_few(unknown)}" if unknown else "it has no keys"
        advice = "Tucker, OFT, GLoRA and biases of LoRA layers are not supported"
        raise StateError(path, what, first, advice)
    expected = {"A", "B"}.union(*parts.values())
    incomplete = [name for name, found in parts.items() if found.keys() != expected]
    if incomplete:
        lack = f"lora_A, lora_B{f', {LENGTHS}' * (LENGTHS in expected)} or an alpha"
        what = f"incomplete LoRA file: {len(incomplete)} of {len(parts)} layers lack {lack}"
        lines = [f"{name} has only {', '.join(parts[name])}" for name in incomplete[:3]]
        raise StateError(path, what, *lines)
    layers = {}
    for name, found in parts.items():
        down, up = found["A"], found["B"]
        if up.numel() != len(up) * len(down):
            what = f"{name} has matrices of different ranks: {tuple(down.shape)} and {tuple(up.shape)}"
            raise StateError(path, what)
        alpha = float(found["alpha"]) if "alpha" in found else None
        lengths = _lengths_of_rows(path, name, found.get(LENGTHS), up)
        layers[name] = LoraWeights(down, up, alpha, name in named, lengths)
    return layers


def _has_form(part: str, tensor: Tensor) -> bool:
    """Return whether a tensor may be this part of a layer."""
    if part == "alpha":
        return tensor.numel() == 1
    least = 1 if part == LENGTHS else 2
    is_array = tensor.ndim >= least and len(tensor) > 0
    return tensor.is_floating_point() and is_array


def _lengths_of_rows(
    path: Path, name: str, stored: Tensor | None, up: Tensor
) -> Tensor | None:
    """Return DoRA's lengths of rows (out,), which a file may have as (out, 1) to
    multiply a weight with.
    """
    if stored is None:
        return None
    if stored.shape not in ((len(up),), (len(up), 1)) or up.ndim != 2:
        what = f"{name} has {len(up)} rows and {LENGTHS} of shape {tuple(stored.shape)}"
        advice = "DoRA is supported for the rows (outputs) of linear layers"
        raise StateError(path, what, advice)
    return stored.reshape(-1)


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
