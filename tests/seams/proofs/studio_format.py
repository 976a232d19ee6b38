"""A format of LoRA files: names of its own, and an alpha that is called strength."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from dstrain.plugin import Component, ModelFamily, Shapes, hookimpl
from dstrain.plugin.lora import Lora, LoraFormat, LoraNames, LoraSource, read_layers
from torch import Tensor

api = 2
PREFIX = "studio/"
NAMES = {"in": "lora_A.weight", "out": "lora_B.weight", "strength": "alpha"}


class Studio(LoraFormat):
    """Files of a program with one denoiser: studio/LAYER/in, out and strength."""

    name = "studio"

    def reads(self, keys: Collection[str], header: Mapping[str, str]) -> bool:
        return bool(keys) and all(key.startswith(PREFIX) for key in keys)

    def components(
        self, path: Path, tensors: Mapping[str, Tensor], family: ModelFamily
    ) -> list[tuple[str, ...]]:
        return [(family.default_trainable,)]

    def read(self, source: LoraSource) -> list[Lora]:
        tensors = {}
        for key, tensor in source.tensors.items():
            layer, _, part = key.removeprefix(PREFIX).rpartition("/")
            if part not in NAMES:
                raise ValueError(f"{key} is of no layer")
            tensors[f"{layer}.{NAMES[part]}"] = tensor
        return read_layers(replace(source, tensors=tensors), LoraNames())

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        return lora_type == "lora"

    def write(
        self, lora: Lora, family: ModelFamily, shapes: Shapes
    ) -> dict[str, Tensor]:
        found = {}
        for layer, own in lora.layers.items():
            folded = own.folded()
            parts = {**folded.parts(), "alpha": torch.tensor(folded.alpha)}
            for name, part in NAMES.items():
                found[f"{PREFIX}{layer}/{name}"] = parts[part]
        return found


@hookimpl
def dstrain_lora_formats() -> Sequence[LoraFormat]:
    return [Studio()]
