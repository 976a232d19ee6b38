"""Derive the names that LoRA files of several programs give to a network's layers.

The names follow from the formats of the network's checkpoints. Names in files are
looked up and never parsed, since '_' in place of '.' cannot be undone.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from dstrain.models import NATIVE, Config, Shapes, components_of
from dstrain.models.components import Component
from dstrain.models.formats import CheckpointFormat, LoraKeyFormat, checkpoint_shapes
from dstrain.registry import ModelFamily

PEFT_PREFIX = "base_model.model."
"""What peft's own files put before every name."""


TRAINERS = ("lora_unet_", "lora_transformer_", "lycoris_")
"""What trainers put before the names of a denoiser with '_' for '.': kohya's scripts and
musubi-tuner; OneTrainer (modules/util/convert/lora); LyCORIS, and SimpleTuner through it.
"""


class Rows(NamedTuple):
    """Rows of a layer in a file that are rows of one of the network's layers."""

    layer: str
    start: int
    stop: int
    offset: int
    """The first of these rows in the network's layer."""


KeyTable = Mapping[str, tuple[Rows, ...]]
"""A layer's name in files -> the network's layers that it is, several where the file
has them fused.
"""


class Prefix(NamedTuple):
    """A beginning of layer names, with the components it stands for: several if their
    layers have the same names.
    """

    text: str
    components: tuple[str, ...]
    underscored: bool


def base_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's weights by name, as if it had no LoRA layers, and
    none of its weights were stored in another form.
    """
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and f"{name}.weight" in shapes:
            shapes[f"{name}.weight"] = (layer.out_features, layer.in_features)
    return {
        name.replace(".base_layer.", "."): shape
        for name, shape in shapes.items()
        if ".lora_" not in name and ".lokr_" not in name
    }


def layers_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the layers that can have LoRA, with the shapes of their weights."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    }


def key_formats(component: Component, family: ModelFamily) -> dict[str, LoraKeyFormat]:
    """Return how each program names this component's layers, as declared or by default.

    `comfyui` and `kohya` have a default for the component that is trained by default,
    and for those with the same keys.
    """
    prefix = family.lora_prefixes.get(component.name, component.name)
    found = {
        "diffusers": LoraKeyFormat("diffusers", (f"{prefix}.",)),
        "diffsynth": LoraKeyFormat("diffsynth", ("", f"pipe.{component.name}.")),
    }
    if component.same_keys_as(components_of(family)[family.default_trainable]):
        original = next(iter(component.formats), NATIVE)
        found["comfyui"] = LoraKeyFormat("comfyui", ("diffusion_model.",), original)
        found["kohya"] = LoraKeyFormat(
            "kohya", ("lora_unet_",), original, underscored=True
        )
    for declared in component.lora:
        if declared.read_only:
            continue
        if not declared.prefixes:
            declared = replace(declared, prefixes=found[declared.program].prefixes)
        found[declared.program] = declared
    return found


def format_of_weights(
    component: Component, family: ModelFamily, program: str, config: Config
) -> CheckpointFormat | None:
    """Return how a program names all weights of a component with this configuration;
    None if it has no names for them. ComfyUI's files may have a mark for what a
    configuration says.
    """
    declared = key_formats(component, family).get(program)
    if declared is None:
        return None
    if program == "comfyui" and declared.checkpoint_format is NATIVE:
        for one in component.formats:
            if one.is_implied_by(config):
                return one
    return declared.checkpoint_format


def prefixes(family: ModelFamily) -> list[Prefix]:
    """Return every known beginning of layer names, the longest first; the last is '',
    for every component.
    """
    found: dict[tuple[str, bool], dict[str, None]] = {}
    for component in components_of(family).values():
        if component.is_folder:
            continue
        formats = [
            LoraKeyFormat("", ("", *component.prefixes)),
            *key_formats(component, family).values(),
            *(one for one in component.lora if one.read_only),
        ]
        if component.same_keys_as(components_of(family)[family.default_trainable]):
            formats.append(LoraKeyFormat("", TRAINERS, underscored=True))
        for key_format in formats:
            for text in key_format.prefixes:
                names = found.setdefault((text, key_format.underscored), {})
                names[component.name] = None
    known = [
        Prefix(text, tuple(names), underscored)
        for (text, underscored), names in found.items()
    ]
    return sorted(known, key=lambda prefix: len(prefix.text), reverse=True)


def narrowed(prefix: Prefix, name: str, family: ModelFamily) -> Prefix:
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


def checkpoint_formats(
    component: Component, family: ModelFamily
) -> list[CheckpointFormat]:
    """Return every format whose names this component's layers may have in files: its
    own, and those of each checkpoint format.
    """
    written = key_formats(component, family).values()
    formats = [one.checkpoint_format for one in (*written, *component.lora)]
    return list(dict.fromkeys((NATIVE, *formats, *component.formats)))


def key_table(checkpoint_format: CheckpointFormat, shapes: Shapes) -> KeyTable:
    """Return the names of a network's layers in files of this format."""
    own = layers_of(shapes)
    found: dict[str, tuple[Rows, ...]] = {}
    for stored, rows in parameter_rows(checkpoint_format, shapes).items():
        layers = tuple(
            one._replace(layer=one.layer.removesuffix(".weight"))
            for one in rows
            if one.layer.removesuffix(".weight") in own
        )
        if layers:
            found[stored.removesuffix(".weight")] = layers
    return found


def parameter_rows(
    checkpoint_format: CheckpointFormat, shapes: Shapes
) -> dict[str, tuple[Rows, ...]]:
    """Return the names of a network's parameters in files of this format -> which rows
    of which parameters they are; those without axes have no rows.
    """
    stored = checkpoint_shapes(checkpoint_format, shapes)
    found: dict[str, list[Rows]] = {}
    for name, pieces in checkpoint_format.convert(stored).items():
        offset = 0
        for piece in pieces:
            if not stored[piece.name]:
                continue
            height = stored[piece.name][0]
            start, stop, _ = slice(piece.start, piece.stop).indices(height)
            rows = Rows(name, start, stop, offset)
            found.setdefault(piece.name, []).append(rows)
            offset += stop - start
    return {
        name: tuple(sorted(rows, key=lambda one: one.start))
        for name, rows in found.items()
    }


def with_underscores(table: KeyTable) -> KeyTable:
    """Return a table with '_' for '.' in its names, without those that become equal."""
    found: dict[str, list[tuple[Rows, ...]]] = {}
    for name, rows in table.items():
        found.setdefault(name.replace(".", "_"), []).append(rows)
    return {name: same[0] for name, same in found.items() if len(same) == 1}


def matching_names(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the names that match a pattern; '{last}' stands for the highest index
    found in its place.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        before, mark, after = pattern.partition("{last}")
        if mark:
            index = re.compile(re.escape(before) + r"(\d+)(?:\.|$)")
            last = 0
            for name in names:
                hit = index.match(name)
                if hit is not None:
                    last = max(last, int(hit[1]))
            pattern = f"{before}{last}{after}"
        found |= dict.fromkeys(fnmatch.filter(names, pattern))
    return list(found)


def unused_layers(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """Return the layers that no loss reaches, given the names of all parameters."""
    return frozenset(
        name.removesuffix(".weight")
        for name in matching_names(patterns, names)
        if name.endswith(".weight")
    )
