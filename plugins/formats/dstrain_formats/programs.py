"""The formats of LoRA files of ComfyUI, kohya's scripts and DiffSynth-Studio."""

from collections.abc import Collection, Mapping

import torch
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    LoraKeyFormat,
    ModelFamily,
    Shapes,
    TrainConfig,
    UsageError,
)
from dstrain.plugin.lora import NATIVE, Config, Layer, Lora, LoraFormat, LoraLayer
from torch import Tensor

from dstrain_formats.fusing import joined, refuse_parts
from dstrain_formats.key_names import (
    format_of_weights,
    key_format_of,
    key_formats,
    key_table,
)
from dstrain_formats.lora_types.dora import lengths_of
from dstrain_formats.options import FormatOptions
from dstrain_formats.reading import OtherNames, is_key_of_lora_file

TYPES = ("lora", "dora", "lokr", "loha")
"""The types of which other programs have names; those of OFT are peft's alone."""


class Program(LoraFormat):
    """A program whose names follow from the formats of checkpoints."""

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        """Return whether it has names, as declared or by default."""
        return lora_type in TYPES and self.name in key_formats(component, family)

    def check(
        self,
        layers: Collection[str],
        lora_type: str,
        component: Component,
        family: ModelFamily,
        shapes: Shapes,
    ) -> None:
        """Refuse other types than LoRA of some layers that the program has as one."""
        if lora_type == "lora":
            return
        refuse_lora_type(lora_type, self.name)
        key_format = key_format_of("what is trained", component.name, family, self.name)
        for rows in key_table(key_format.checkpoint_format, shapes).values():
            refuse_parts(layers, rows, lora_type)

    def write(
        self, lora: Lora, family: ModelFamily, shapes: Shapes
    ) -> dict[str, Tensor]:
        """Return the tensors of a file."""
        key_format = key_format_of("what is trained", lora.component, family, self.name)
        return layers_in(lora, key_format, shapes)

    def weights(
        self, component: Component, family: ModelFamily, config: Config
    ) -> CheckpointFormat | None:
        """Return the names of all weights; None where there are names for the layers of a
        LoRA alone.
        """
        declared = key_formats(component, family).get(self.name)
        whole = (NATIVE, *component.formats)
        if declared is None or declared.underscored:
            return None
        if declared.checkpoint_format not in whole:
            return None
        return format_of_weights(component, family, self.name, config)


class ComfyUI(Program):
    """ComfyUI; it is also what reads the files of all programs."""

    name = "comfyui"
    title = "ComfyUI"
    fallback = True
    names = OtherNames()

    def reads(self, keys: Collection[str], header: Mapping[str, str]) -> bool:
        """Return whether any key is of a kind that is known."""
        return any(map(is_key_of_lora_file, keys))

    def needs_export(
        self, component: Component, family: ModelFamily, lora_type: str, saved: str
    ) -> bool:
        """Return whether it does not read a file, by what the family declares; DoRA in any
        other names.
        """
        if lora_type == "dora":
            return saved != self.name and self.has_names(component, family, lora_type)
        return any(
            names.program == self.name
            and saved not in (names.program, *names.also_reads)
            for names in component.lora
        )


class Kohya(Program):
    """kohya's scripts, and musubi-tuner."""

    name = "kohya"


class DiffSynth(Program):
    """DiffSynth-Studio, which reads LoRA alone, and ignores the keys of other types."""

    name = "diffsynth"
    aliases = ("reference",)

    def asked_by(self, options: object) -> str:
        """Return the option that asks for it, if it is given."""
        assert isinstance(options, TrainConfig)
        given = options.of(FormatOptions).remove_prefix_in_ckpt
        return "--remove_prefix_in_ckpt" if given else ""

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        """Return whether it has names, and reads the type."""
        return lora_type == "lora" and super().has_names(component, family, lora_type)


PROGRAMS = (ComfyUI(), Kohya(), DiffSynth())


def refuse_lora_type(lora_type: str, program: str) -> None:
    """Raise UsageError for a type of which a program has no names."""
    known = TYPES[:1] if program == "diffsynth" else TYPES
    if program != "diffusers" and lora_type not in known:
        what = f"{program} has no key names for {lora_type}, and ignores its keys"
        others = "diffusers or comfyui" if lora_type in TYPES else "diffusers"
        raise UsageError("--lora_format", what, f"give {others}")


def layers_in(
    lora: Lora, key_format: LoraKeyFormat, shapes: Shapes
) -> dict[str, Tensor]:
    """Return the tensors of a LoRA by their keys in a program's file.

    alpha / rank becomes part of lora_B, as in every file that dstrain writes. ComfyUI
    and kohya have lora_down, lora_up and an alpha that equals the rank.

    Args:
        lora: The LoRA of one component.
        key_format: The program's names for it.
        shapes: The shapes of the component's network.
    """
    refuse_lora_type(lora.type, key_format.program)
    found: dict[str, Tensor] = {}
    for name, rows in key_table(key_format.checkpoint_format, shapes).items():
        if not any(one.layer in lora.layers for one in rows):
            continue
        if key_format.underscored:
            name = name.replace(".", "_")
        matrices = _matrices(joined(lora.layers, rows), key_format.program)
        for ending, tensor in matrices.items():
            found[f"{key_format.prefixes[0]}{name}.{ending}"] = tensor
    return found


def _matrices(layer: Layer, program: str) -> dict[str, Tensor]:
    if not isinstance(layer, LoraLayer):
        parts = layer.parts()
        if program != "diffusers":
            parts["alpha"] = torch.tensor(layer.alpha)
        return parts
    # DiffSynth-Studio's trainer writes `lora_A.default.weight`, which not all of its
    # loaders find; all of them find these.
    if program in ("diffusers", "diffsynth"):
        return layer.parts()
    alpha = torch.tensor(layer.alpha)
    found = {"lora_down.weight": layer.down, "lora_up.weight": layer.up, "alpha": alpha}
    lengths = lengths_of(layer)
    if lengths is not None:
        # ComfyUI multiplies the weight with it.
        found["dora_scale"] = lengths[:, None]
    return found
