"""Differential LoRA training: a LoRA that is merged into the weights it is for before
anything is trained.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn

from dstrain.graph.spec import PipelineSpec
from dstrain.lora.layers import merge_layers
from dstrain.lora.names import shapes_of, unused_layers
from dstrain.lora.reader import read_lora
from dstrain.models.locate import Found
from dstrain.registry.family import ModelFamily
from dstrain.storage.hashing import sha256


@dataclass(frozen=True)
class Preset:
    """A LoRA file and the component into whose weights it is merged."""

    path: Path
    component: str

    @cached_property
    def digest(self) -> str:
        """The sha256 of the file, part of whatever is computed with the weights."""
        return sha256(self.path)

    def into(self, found: Found) -> Found:
        """What was found, with the file beside those of its component, if that is among
        them.
        """
        files = {
            name: replace(f, preset=self.path) if name == self.component else f
            for name, f in found.files.items()
        }
        return replace(found, files=files)


def merge_preset(
    module: nn.Module,
    component: str,
    path: Path,
    family: ModelFamily,
    spec: PipelineSpec,
) -> None:
    """Merge a LoRA file of any naming into a component's weights; raises what
    `read_lora` raises.
    """
    shapes = shapes_of(module)
    optional_layers = unused_layers(spec.unused_parameters.get(component, ()), shapes)
    for lora in read_lora(
        path, family, {component: shapes}, component, {component: optional_layers}
    ):
        merge_layers(module, lora.layers)
