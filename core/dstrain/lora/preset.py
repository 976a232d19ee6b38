"""Merge a preset LoRA into the weights it is for, before anything else is trained."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn

from dstrain.graph.spec import PipelineSpec
from dstrain.lora.layers import merge_layers
from dstrain.lora.names import shapes_of
from dstrain.lora.reader import read_lora
from dstrain.models.locate import Found
from dstrain.registry.family import ModelFamily
from dstrain.storage.hashing import sha256


@dataclass(frozen=True)
class Preset:
    """A LoRA file and the component whose weights it is merged into."""

    path: Path
    component: str

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the file, a part of the key of every result computed
        with the merged weights.
        """
        return sha256(self.path)

    def add_to(self, found: Found) -> Found:
        """Return the files found with this one beside those of its component, if there
        are any.
        """
        if self.component not in found.files:
            return found
        merged = replace(found.files[self.component], preset=self.path)
        return replace(found, files={**found.files, self.component: merged})


def merge_preset(
    module: nn.Module,
    component: str,
    path: Path,
    family: ModelFamily,
    spec: PipelineSpec,
) -> None:
    """Merge a LoRA file with any naming into a component's weights; raises what
    `read_lora` raises.
    """
    networks = {component: shapes_of(module)}
    for lora in read_lora(path, family, networks, component, spec.unused_parameters):
        merge_layers(module, lora.layers)
