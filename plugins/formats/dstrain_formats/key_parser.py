"""Parse the keys of LoRA files of other programs: they become those of peft."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dstrain.plugin import first_few
from dstrain.plugin.lora import StateError, StoredLayer, parse_keys
from torch import Tensor

from dstrain_formats.differences import DIFFERENCE, split_differences

OTHER_KEY = re.compile(
    r"(?P<layer>.+)\.(?:lora[_.](?P<way>down|up)\.weight|(?P<lengths>dora_scale)"
    # XLabs: a layer is called `qkv_lora1`, and its matrices `down` and `up`.
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))(?P<own>down|up)\.weight)"
)
PEFT_KEY = re.compile(
    r".+\.(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|lokr_|hada_|oft_R)\b.*"
    r"|.+\.(?:lokr|hada)_.*"
)
NAMED = re.compile(r"(?!base_model\.model\.).+\.lora_[AB]\.[^.]+\.weight")
"""A key that has the name of an adapter."""
PARTS = MappingProxyType({"down": "lora_A.weight", "up": "lora_B.weight"})
LENGTHS = "lora_magnitude_vector"


def is_key_of_lora_file(key: str) -> bool:
    """Return whether a key may be one of a LoRA file, as a difference of a whole parameter
    is; an alpha may be a network's own.
    """
    return any(one.fullmatch(key) for one in (OTHER_KEY, PEFT_KEY, DIFFERENCE))


def is_named(key: str) -> bool:
    """Return whether a key contains the name of an adapter, and is not peft's, or is XLabs'
    own: where these are, alpha is the rank.
    """
    other = OTHER_KEY.fullmatch(key)
    return bool(NAMED.fullmatch(key) or (other and other["own"]))


def is_of_ai_toolkit(header: Mapping[str, str]) -> bool:
    """Return whether ai-toolkit wrote a file (toolkit/metadata.py of ostris/ai-toolkit):
    in its names of diffusers alpha is always the rank, and left out.
    """
    try:
        return bool(json.loads(header.get("software", "{}"))["name"] == "ai-toolkit")
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def parse_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
    """Return what a file holds of each layer, and of each parameter of which it has the
    difference.

    Raises StateError for keys that are missing, duplicate, unknown or of another kind of
    file, and for values that are not finite numbers.
    """
    found, others = split_differences(path, tensors)
    if others or not found:
        found |= parse_keys(path, in_peft_names(path, others))
    return found


def in_peft_names(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of layers by peft's keys; raises StateError for two of one key,
    and where some layers of LoRA have lengths of DoRA, and others none.
    """
    found: dict[str, Tensor] = {}
    pairs, with_lengths = set(), set()
    for key, tensor in tensors.items():
        name, hit = key, OTHER_KEY.fullmatch(key)
        if hit is not None:
            part = LENGTHS if hit["lengths"] else PARTS[hit["way"] or hit["own"]]
            name = f"{hit['layer']}.{part}"
        layer, _, part = name.partition(".lora_")
        if part.startswith("magnitude"):
            with_lengths.add(layer)
            # To multiply a weight with, they are (out, 1).
            tensor = tensor.flatten() if tensor.shape[1:] == (1,) else tensor
        elif part:
            pairs.add(layer)
        if name in found:
            raise StateError(path, f"contains {name} twice, the second time as {key}")
        found[name] = tensor
    without = sorted(pairs - with_lengths)
    if with_lengths and without:
        what = f"incomplete LoRA file: {len(without)} of {len(pairs)} layers lack the lengths of DoRA"
        raise StateError(path, what, f"the first: {first_few(without)}")
    return found
