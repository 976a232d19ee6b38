"""Resolve the LoRA of --preset_lora_path: the component whose weights it is merged into."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.graph.spec import PipelineSpec
from dstrain.lora.reader import check_lora_file, groups_in
from dstrain.registry.family import ModelFamily
from dstrain.storage.hashing import sha256
from dstrain.storage.safetensors import read_tensors


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


def find_preset(
    path: Path, component: str | None, family: ModelFamily, spec: PipelineSpec
) -> Preset:
    """Return the preset of a LoRA file.

    Its component is the one given, else what the header or the keys of the file name.
    Raises UsageError if they name none, StateError for a file that cannot be read.
    """
    check_lora_file(path)
    tensors, header = read_tensors(path)
    for name in (component, header.get("component")):
        if name is not None and name in spec.components:
            return Preset(path, name)
    groups = groups_in(path, tensors, family)
    fitting = [
        name
        for name in spec.components
        if all(name in group.prefix.components for group in groups)
    ]
    if len(fitting) != 1:
        names = " or ".join(fitting) or "several components"
        what = f"is required: {path} may be for {names}"
        raise UsageError("--preset_lora_model", what)
    return Preset(path, fitting[0])
