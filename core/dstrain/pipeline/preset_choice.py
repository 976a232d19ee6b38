"""Resolve the LoRA of --preset_lora_path: the components whose weights it is merged into."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dstrain.config import LoraFile, split_commas
from dstrain.config.lora_file import SKIP_MISSING
from dstrain.errors import StateError, UsageError
from dstrain.graph import PipelineSpec
from dstrain.lora import check_lora_file, components_in
from dstrain.registry import ModelFamily
from dstrain.storage import read_tensors, sha256


@dataclass(frozen=True)
class Preset:
    """A LoRA file and the components whose weights it is merged into."""

    file: LoraFile
    components: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the file, with what else decides its effect: a part of
        the key of every result computed with the merged weights.
        """
        return sha256(self.file.path) + self.file.changes


def find_preset(
    file: LoraFile, component: str | None, family: ModelFamily, spec: PipelineSpec
) -> Preset:
    """Return the preset of a LoRA file.

    Its components are those given, else those that its keys name, of several that they may
    mean the one that its header names. Raises UsageError if that is none, or if it has
    layers of another component than is given; StateError for a file that cannot be read.

    component: The value of --preset_lora_model; the path, too, may begin with one.
    """
    file = file.of(spec.components)
    if file.component and component and split_commas(component) != (file.component,):
        what = f"is {component}, and --preset_lora_path begins with {file.component}="
        raise UsageError("--preset_lora_model", what, "give one of the two")
    check_lora_file(file.path)
    tensors, header = read_tensors(file.path)
    groups = components_in(file.path, tensors, header, family)
    names = (file.component,) if file.component else split_commas(component)
    if names:
        _check_all_used(file, names, groups)
        return Preset(file, names)
    named = header.get("component", "")
    found = [_component_of(group, named, file, spec) for group in groups]
    return Preset(file, tuple(dict.fromkeys(found)))


def _component_of(
    candidates: Sequence[str], named: str, file: LoraFile, spec: PipelineSpec
) -> str:
    """Return the component that a group of layers is for: of those that its keys allow, the
    one that the file's header names, as `read_lora` has it.
    """
    fitting = [name for name in spec.components if name in candidates]
    if named in fitting:
        return named
    if len(fitting) != 1:
        names_of = " or ".join(fitting) or "several components"
        what = f"is required: {file.path} may be for {names_of}"
        raise UsageError("--preset_lora_model", what)
    return fitting[0]


def _check_all_used(
    file: LoraFile, names: Sequence[str], groups: Sequence[Sequence[str]]
) -> None:
    """Refuse layers of components that a preset is not merged into."""
    unlike = [one for one in groups if not set(names) & set(one)]
    if len(unlike) == len(groups):
        of = " or ".join(groups[0])
        raise StateError(file.path, f"is a LoRA for {of}, not for {', '.join(names)}")
    if unlike and not file.skip_missing:
        what = f"{file.path} also has layers for {' or '.join(unlike[0])}"
        advice = f"name these as well, or leave them out: {file.path}@{SKIP_MISSING}"
        raise UsageError("--preset_lora_model", what, advice)
