"""The names that LoRA files of several programs give to a network's layers, derived
from the layouts of its weights.

Names in files are looked up and never parsed, since '_' in the place of '.' cannot be
undone.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from dstrain.models.components import Component
from dstrain.models.formats import (
    CheckpointFormat,
    LoraKeyFormat,
    Shapes,
    checkpoint_shapes,
)
from dstrain.registry.family import ModelFamily

PROGRAMS = ("diffusers", "comfyui", "kohya", "diffsynth")
"""Programs whose files are read and written: the last is DiffSynth-Studio."""
PEFT_PREFIX = "base_model.model."
"""What peft's own files put before every name."""


class Rows(NamedTuple):
    """Rows `start` to `stop` of a layer in a file are rows of the network's layer
    `own`, there beginning with `at`.
    """

    own: str
    start: int
    stop: int
    at: int


KeyTable = Mapping[str, tuple[Rows, ...]]
"""A layer's name in files -> the network's layers that it is, several where the file
has them fused.
"""


class Prefix(NamedTuple):
    """What the names of layers of these components (twins, where several) begin with."""

    text: str
    components: tuple[str, ...]
    underscored: bool


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a network's weights by name, as if no LoRA layer had been added to
    it.
    """
    state = {
        name.replace(".base_layer.", "."): value
        for name, value in network.state_dict().items()
    }
    return {
        name: tuple(value.shape)
        for name, value in state.items()
        if ".lora_" not in name
    }


def layers_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The layers that a LoRA can be of, with the shapes of their weights."""
    return {
        name.removesuffix(".weight"): s
        for name, s in shapes.items()
        if name.endswith(".weight") and len(s) > 1
    }


def key_formats(component: Component, family: ModelFamily) -> tuple[LoraKeyFormat, ...]:
    """How each program names this component's layers: as it declares, else by default.

    The default of `comfyui` and `kohya` is for the component that is trained by
    default, and for its twins.
    """
    found = {
        "diffusers": LoraKeyFormat(
            "diffusers",
            (f"{family.lora_prefixes.get(component.name, component.name)}.",),
        ),
        "diffsynth": LoraKeyFormat("diffsynth", ("", f"pipe.{component.name}.")),
    }
    known: tuple[Component, ...] = family.load("components")
    if any(
        component.same_keys_as(other)
        for other in known
        if other.name == family.default_trainable
    ):
        checkpoint_format = next(iter(component.formats), None)
        found["comfyui"] = LoraKeyFormat(
            "comfyui", ("diffusion_model.",), checkpoint_format
        )
        found["kohya"] = LoraKeyFormat(
            "kohya", ("lora_unet_",), checkpoint_format, underscored=True
        )
    found |= {naming.program: naming for naming in component.lora}
    return tuple(found[program] for program in PROGRAMS if program in found)


def prefixes(family: ModelFamily) -> tuple[Prefix, ...]:
    """Every known beginning of a name of a layer, the longest first; the last is '',
    and of every component.
    """
    found: dict[tuple[str, bool], list[str]] = {}
    known: tuple[Component, ...] = family.load("components")
    for component in (component for component in known if not component.is_folder):
        own = [
            (text, naming.underscored)
            for naming in key_formats(component, family)
            for text in naming.prefixes
        ]
        for place in dict.fromkeys(
            [*own, *((text, False) for text in component.prefixes), ("", False)]
        ):
            found.setdefault(place, []).append(component.name)
    ordered = sorted(found.items(), key=lambda item: -len(item[0][0]))
    return tuple(
        Prefix(text, tuple(components), underscored)
        for (text, underscored), components in ordered
    )


def key_tables(
    component: Component, family: ModelFamily, shapes: Shapes
) -> dict[CheckpointFormat | None, KeyTable]:
    """Every set of names that this network's layers have in files: its own (None), and
    those of each layout.
    """
    declared = [naming.checkpoint_format for naming in key_formats(component, family)]
    tables = [
        checkpoint_format
        for checkpoint_format in (*declared, *component.formats)
        if checkpoint_format is not None and not callable(checkpoint_format.rows)
    ]
    return {
        checkpoint_format: key_table(checkpoint_format, shapes)
        for checkpoint_format in dict.fromkeys((None, *tables))
    }


def key_table(checkpoint_format: CheckpointFormat | None, shapes: Shapes) -> KeyTable:
    """The names of the layers of a network of these shapes in files of this layout
    (None: its own names).
    """
    own = layers_of(shapes)
    if checkpoint_format is None:
        return {name: (Rows(name, 0, shape[0], 0),) for name, shape in own.items()}
    there = checkpoint_shapes(checkpoint_format, shapes)
    found: dict[str, list[Rows]] = {}
    for name, pieces in checkpoint_format.convert(there).items():
        at = 0
        for piece in pieces if name.removesuffix(".weight") in own else ():
            start, stop, _ = slice(piece.start, piece.stop).indices(
                there[piece.name][0]
            )
            rows = Rows(name.removesuffix(".weight"), start, stop, at)
            found.setdefault(piece.name.removesuffix(".weight"), []).append(rows)
            at += stop - start
    return {
        name: tuple(sorted(rows, key=lambda one: one.start))
        for name, rows in found.items()
    }


def dotted_names(names: Iterable[str]) -> dict[str, str]:
    """Names with '_' for '.' -> the names; those that two have are left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.replace(".", "_"), []).append(name)
    return {
        underscored: same[0] for underscored, same in found.items() if len(same) == 1
    }


def matching_names(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The names that match a pattern; '{last}' stands for the highest index found in
    its place.
    """
    resolved = [_resolved(pattern, names) for pattern in patterns]
    return [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in resolved)
    ]


def unused_layers(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The layers of a network that no loss reaches, of the names of its parameters."""
    return frozenset(layers_of(dict.fromkeys(matching_names(patterns, names), (1, 1))))


def _resolved(pattern: str, names: Iterable[str]) -> str:
    before, mark, after = pattern.partition("{last}")
    if not mark:
        return pattern
    indices = [
        name[len(before) :].partition(".")[0]
        for name in names
        if name.startswith(before)
    ]
    return f"{before}{max((int(index) for index in indices if index.isdigit()), default=0)}{after}"
