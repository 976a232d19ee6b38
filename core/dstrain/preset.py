"""Differential LoRA training: a LoRA that is merged into the weights it is for before anything is trained."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from dstrain.config import TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.files import read_tensors, sha256
from dstrain.lora import merge_layers
from dstrain.lora_files import check_lora_file, groups_in, read_lora
from dstrain.lora_names import shapes_of
from dstrain.model_files import Found
from dstrain.record import ModelRecord
from dstrain.sampler import generate_task
from dstrain.trainables import unreached_layers
from dstrain.wiring import Wiring

if TYPE_CHECKING:
    from dstrain.setup import Setup


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
        """What was found, with the file beside those of its component, if that is among them."""
        files = {name: replace(f, preset=self.path) if name == self.component else f for name, f in found.files.items()}
        return replace(found, files=files)


def preset_of(config: TrainConfig, record: ModelRecord, wiring: Wiring) -> Preset | None:
    """The preset that the flags name: for --preset_lora_model, else the component its header or its keys name.

    Raises UsageError if neither says one that the variant has, StateError for a file that cannot be read.
    """
    path, named = config.preset_lora_path, config.preset_lora_model
    if path is None:
        return None
    if named is not None and named not in wiring.components:
        known = f"{', '.join(wiring.components)}{nearest(named, wiring.components)}"
        what = f"variant {wiring.variant} has no component {named!r}; components: {known}"
        raise UsageError("--preset_lora_model", what)
    check_lora_file(path)
    tensors, header = read_tensors(path)
    groups = groups_in(path, tensors, record)
    told = [name for name in wiring.components if all(name in group.prefix.components for group in groups)]
    by_header = [name for name in told if name == header.get("component")]
    component = named or (by_header[0] if by_header else told[0] if len(told) == 1 else "")
    if not component:
        what = f"is required: {path} may be of {' or '.join(told)}" if told else f"{path} is of several components"
        raise UsageError("--preset_lora_model", what)
    return Preset(path, component)


def check_preset(setup: "Setup") -> None:
    """Raise UsageError for a preset of a component that neither training nor a preview loads, in any stage."""
    preset, wiring = setup.preset, setup.wiring
    if preset is None:
        return
    plans = [setup.plan(setup.all_inputs())]
    if setup.config.preview_prompt:
        plans.append(wiring.plan(frozenset(wiring.inputs), generate_task(wiring, guided=True)))
    loaded = dict.fromkeys(name for plan in plans for names in plan.components.values() for name in names)
    if preset.component not in loaded:
        what = f"would do nothing: {preset.path} is for {preset.component}, which this run does not load"
        raise UsageError("--preset_lora_path", what, f"it loads {', '.join(loaded)}")


def merge_preset(module: nn.Module, component: str, path: Path, record: ModelRecord, wiring: Wiring) -> None:
    """Merge a LoRA file of any naming into a component's weights; raises what `read_lora` raises."""
    shapes = shapes_of(module)
    spare = unreached_layers(wiring.unreached.get(component, ()), shapes)
    for lora in read_lora(path, record, {component: shapes}, component, {component: spare}):
        merge_layers(module, lora.layers)
