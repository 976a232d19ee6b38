"""Read LoRA files of other programs: their keys become those of peft, and the names of
layers are found in tables, which follow from the formats of a network's checkpoints.
"""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.plugin import Component, ModelFamily, Shapes, first_few, get_logger
from dstrain.plugin.lora import (
    Change,
    Contents,
    Group,
    KeyTable,
    Layer,
    LoraLayer,
    LoraNames,
    LoraSource,
    Prefix,
    Rows,
    StateError,
    StoredLayer,
    components_of,
    layers_of,
    parse_keys,
)
from torch import Tensor

from dstrain_formats.differences import (
    DIFFERENCE,
    Difference,
    difference_fits,
    difference_table,
    own_differences,
    split_differences,
)
from dstrain_formats.fusing import divided, merged_parts, split_fused
from dstrain_formats.key_names import (
    checkpoint_formats,
    key_table,
    prefixes,
    with_underscores,
)
from dstrain_formats.lora_types import TYPES
from dstrain_formats.lora_types.loha import LohaLayer
from dstrain_formats.lora_types.lokr import LokrLayer

logger = get_logger("dstrain.formats")
NO_ALPHA = (
    "has no alpha; using the rank, as DiffSynth-Studio and XLabs do with these names"
)
OTHER_KEY = re.compile(
    # Diffusers' scripts before peft: `lora_linear_layer`.
    r"(?P<layer>.+)\.(?:lora(?:[_.]|_linear_layer\.)(?P<way>down|up)\.weight"
    r"|(?P<lengths>dora_scale)"
    # XLabs: a layer is called `qkv_lora1`, and its matrices `down` and `up`.
    r"|(?:(?<=_lora\.)|(?<=_lora[12]\.))(?P<own>down|up)\.weight)"
)
MARKS = "|".join([r"lora_(?:embedding_)?[AB]", *TYPES.values()])
PEFT_KEY = re.compile(rf".+\.(?:{MARKS})\b.*")
NAMED = re.compile(r"(?!base_model\.model\.).+\.lora_[AB]\.[^.]+\.weight")
"""A key that has the name of an adapter."""
PARTS = MappingProxyType({"down": "lora_A.weight", "up": "lora_B.weight"})
LENGTHS = "lora_magnitude_vector"


class OtherNames(LoraNames):
    """The names of every known program, and those of diffusers and peft."""

    def prefixes(self, family: ModelFamily) -> list[Prefix]:
        """Return the beginnings of layer names in all programs."""
        return prefixes(family)

    def parse(
        self, path: Path, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, StoredLayer]:
        """Return layers, and differences of whole parameters."""
        return parse_file(path, tensors)

    def arranged(self, groups: list[Group], family: ModelFamily) -> list[Group]:
        """Return groups by the components that may have layers of these names.

        Names that may be of either of two networks, which share their files, are of the
        group that says more, or of several such, of that of the default component.
        """
        found: dict[tuple[Prefix, bool], Group] = {}
        for group in groups:
            for name, layer in group.layers.items():
                key = (_narrowed(group.prefix, name, family), group.peft)
                found.setdefault(key, Group(*key, {})).layers[name] = layer
        kept: list[Group] = []
        # The narrowest first.
        for group in sorted(found.values(), key=lambda one: len(one.prefix.components)):
            own = set(group.prefix.components)
            narrower = [
                one
                for one in kept
                if (one.prefix.text, one.peft) == (group.prefix.text, group.peft)
                and own.issuperset(one.prefix.components)
            ]
            narrower.sort(
                key=lambda one: family.default_trainable not in one.prefix.components
            )
            if narrower:
                narrower[0].layers.update(group.layers)
            else:
                kept.append(group)
        return [one for one in found.values() if any(one is other for other in kept)]

    def alpha_is_rank(self, source: LoraSource) -> bool:
        """Return whether a file's names, or its program, mean the rank."""
        if is_of_ai_toolkit(source.header):
            return True
        if not all(is_named(key) for key in source.tensors):
            return False
        # dstrain's own files with these names always had alpha / rank as part of B.
        if not {"family", "alpha"} <= source.header.keys():
            logger.warning(f"{source.path}: {NO_ALPHA}")
        return True

    def tables(
        self, component: Component, family: ModelFamily, shapes: Shapes, prefix: Prefix
    ) -> Iterator[KeyTable]:
        """Yield a table for each format of the component's checkpoints."""
        underscored = prefix.underscored
        for one in checkpoint_formats(component, family):
            table = key_table(one, shapes)
            table = with_underscores(table) if underscored else table
            yield {**table, **difference_table(one, shapes, underscored)}

    def fits(self, stored: Any, rows: tuple[Rows, ...], shapes: Shapes) -> bool:
        """Return whether a layer, or a difference, has the shape of what it stands for."""
        if isinstance(stored, Difference):
            return difference_fits(stored, rows, shapes)
        own = layers_of(shapes)
        if isinstance(stored, LoraLayer):
            if len(rows) > 1 and len(stored.up) != rows[-1].stop:
                return False
            split = split_fused(stored, rows)
            return all(one.fits(own[name]) for name, one in split.items())
        if len(rows) == 1:
            return bool(stored.fits(own[rows[0].layer]))
        height, width = stored.shape
        return height == rows[-1].stop and all(
            own[one.layer][1:] == (width,) for one in rows
        )

    def contents(
        self, path: Path, layers: Mapping[str, Any], table: KeyTable, shapes: Shapes
    ) -> Contents:
        """Return layers, products of several layers at once, and differences."""
        found: dict[str, Layer] = {}
        merged: dict[str, Change] = {}
        differences: dict[str, Difference] = {}
        for rest, stored in layers.items():
            rows = table[rest]
            if isinstance(stored, Difference):
                differences[rest] = stored
            elif len(rows) > 1 and isinstance(stored, LohaLayer | LokrLayer):
                merged |= merged_parts(stored, rows)
            else:
                found |= divided(stored, rows)
        own = own_differences(path, differences, table, shapes)
        return Contents(found, (merged, own))


def _narrowed(prefix: Prefix, name: str, family: ModelFamily) -> Prefix:
    """Return a prefix without the components that cannot have a layer of this name: where
    networks share their files, the formats of each say which names there are another's.

    name: The rest of the layer's name, after the prefix.
    """
    if len(prefix.components) < 2:
        return prefix
    known = components_of(family)
    left = tuple(
        one
        for one in prefix.components
        if not any(
            fnmatch.fnmatchcase(name, pattern)
            for pattern in _names_of_others(known[one], prefix.underscored)
        )
    )
    return prefix._replace(components=left) if left else prefix


def _names_of_others(component: Component, underscored: bool) -> list[str]:
    patterns = [name for one in component.formats for name in one.ignored]
    return [name.replace(".", "_") if underscored else name for name in patterns]


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
