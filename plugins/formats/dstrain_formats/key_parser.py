"""Parse the keys of LoRA files of other programs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dstrain.plugin.lora import LoraLayer, StateError, StoredLayer, first_few
from torch import Tensor

from dstrain_formats.differences import DIFFERENCE, split_differences
from dstrain_formats.dora import lora_layer
from dstrain_formats.loha import parse_loha
from dstrain_formats.lokr import parse_lokr

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
        return lora_layer(self.down, self.up, alpha, self.magnitude)


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


def parse_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
    """Return what a file holds of each layer, and of each parameter of which it has the
    difference; raises what `parse_keys` raises.
    """
    found: dict[str, StoredLayer] = {}
    differences, others = split_differences(path, tensors)
    if others or not differences:
        found |= parse_keys(path, others)
    return found | differences


def parse_keys(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
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
    found: dict[str, StoredLayer] = {}
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
