"""Derive the names that LoRA files of several programs give to a network's layers.

The names follow from the formats of the network's checkpoints. Names in files are
looked up and never parsed, since '_' in place of '.' cannot be undone.
"""

from dataclasses import replace
from pathlib import Path

from dstrain.plugin import (
    CheckpointFormat,
    Component,
    LoraKeyFormat,
    ModelFamily,
    Shapes,
    UsageError,
)
from dstrain.plugin.lora import (
    NATIVE,
    Config,
    KeyTable,
    Prefix,
    Rows,
    checkpoint_shapes,
    components_of,
    layers_of,
)

TRAINERS = ("lora_unet_", "lora_transformer_", "lycoris_")
"""What trainers put before the names of a denoiser with '_' for '.': kohya's scripts and
musubi-tuner; OneTrainer (modules/util/convert/lora); LyCORIS, and SimpleTuner through it.
"""


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
            if one.implies and dict(one.implies).items() <= config.items():
                return one
    return declared.checkpoint_format


def key_format_of(
    source: Path | str, component: str, family: ModelFamily, program: str
) -> LoraKeyFormat:
    """Return a program's names for a component; raises UsageError if it has none."""
    found = key_formats(components_of(family)[component], family)
    if program not in found:
        what = f"{program} has no key names for LoRA on {component}, but {source} has layers of it"
        line = f"{component} has names in {', '.join(found)}"
        raise UsageError("--format", what, line)
    return found[program]


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
            if not stored[piece.name] or piece.transposed:
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
