"""Load components: each weight is put where it is kept as soon as it is read."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.config import LoraFile
from dstrain.console import get_logger
from dstrain.errors import reading
from dstrain.graph import PipelineSpec
from dstrain.graph.keepers import AS_LOADED, Keepers, asking
from dstrain.lora import Lora, base_shapes, log_differences, merge, read_lora
from dstrain.lora.layers import Change, by_weight, together
from dstrain.lora.merging import merged
from dstrain.models import Files, Found, components_of, empty_component
from dstrain.models.components import Component
from dstrain.models.network_files import check_files
from dstrain.models.placing import (
    OwnRows,
    place_buffers,
    place_weights,
    set_dtype,
    tied_names,
)
from dstrain.registry import ModelFamily

logger = get_logger(__name__)
NO_PARTS: Mapping[str, OwnRows] = MappingProxyType({})


def load_components(
    family: ModelFamily,
    spec: PipelineSpec,
    found: Found,
    device: torch.device,
    dtype: torch.dtype,
    full_precision: Collection[str] = (),
    empty: bool = False,
    parts: Mapping[str, OwnRows] = NO_PARTS,
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Load what was found; return it and the configurations, by name. The arguments are
    those of `Pipeline.from_found`.
    """
    known = components_of(family)
    configs = {}
    for name, content in found.configs.items():
        with reading(f"config.json of {name}"):
            configs[name] = known[name].configure(content)
    components = {}
    for name in dict.fromkeys((*found.files, *(found.configs if empty else ()))):
        unused = spec.unused_parameters.get(name, ())
        given = (family, known[name], found.files.get(name), device, unused)
        loader = Loader(*given, found.keepers, parts.get(name), spec.variant)
        own_dtype = torch.float32 if name in full_precision else dtype
        if empty and not known[name].is_folder:
            module = loader.build_empty(found.configs[name])
            if module is not None:
                set_dtype(module, own_dtype)
                components[name] = module
        else:
            components[name] = loader.load(configs.get(name), own_dtype)
    return components, configs


@dataclass
class Loader:
    """Loads one component of a family: frozen, in eval mode, its preset LoRA merged."""

    family: ModelFamily
    component: Component
    files: Files | None
    """Its files; None where nothing but its configuration was found."""
    device: torch.device
    unused_parameters: Collection[str] = ()
    """Patterns of parameters that no loss reaches, whose layers a preset may lack."""
    keepers: Keepers = AS_LOADED
    """How the weights are kept."""
    part: OwnRows | None = None
    """Takes the rows of weights that this process has; None for all."""
    variant: str = ""
    """The variant in use, with which what a preset was trained for is compared."""
    _change: "_PresetChange | None" = field(default=None, init=False)
    """What the preset changes, once it is read."""

    def __post_init__(self) -> None:
        self._keepers = self.keepers.of(self.component.name)
        self._is_stored = any(one.kind == "quantize" for one in self._keepers)

    def load(self, configuration: Any, dtype: torch.dtype) -> Any:
        """Load the component; raises what its network raises, and `read_lora`.

        Args:
            configuration: From `Component.configure`; None for a tokenizer.
            dtype: The dtype of its weights as they are read.
        """
        assert self.files is not None
        load: Any = self.component.network.load
        if "place" in inspect.signature(load).parameters:
            loaded = load(self.files, configuration, dtype, place=self.place)
        else:
            loaded = load(self.files, configuration, dtype)
            if isinstance(loaded, nn.Module):
                place_weights(loaded, self.place)
        if not isinstance(loaded, nn.Module):
            return loaded
        place_buffers(loaded, self.device)
        self._merge_tied(loaded)
        if self.files.preset is not None:
            preset = self.files.preset
            what = f"preset {preset.path}{preset.changes}"
            left = "; what is generated is without it"
            into = f"{self.component.name}{left if preset.training_only else ''}"
            logger.info(f"{what} merged into {into}")
            for lora in self._preset_of(loaded).loras:
                log_differences(lora, preset.path, self.variant, self.files)
        return loaded.requires_grad_(False).eval()

    def build_empty(self, config: Mapping[str, Any]) -> nn.Module | None:
        """Build the component without memory and compare its files with it; None if it
        cannot be built without files.
        """
        network = empty_component(self.component, config)
        if network is None:
            return None
        if self.files is not None:
            check_files(network, self.files)
            self._preset_of(network)
        return network.requires_grad_(False).eval().to("meta")

    def place(self, network: nn.Module, name: str, weight: Tensor) -> Tensor:
        """Move a weight to its device, merge what the preset changes of it, and let keepers
        place it.

        One that lives in RAM is on the device only for that.
        """
        change = self._preset_of(network)
        changed = change.parameters.get(name)
        own = self.component.name
        if (
            changed is not None
            or self._is_stored
            or self.part is not None
            or not any(one.is_in_ram(own, network, name) for one in self._keepers)
        ):
            weight = weight.to(self.device)
        if changed is not None and name not in tied_names(network):
            module = network.get_submodule(name.rpartition(".")[0])
            weight = merged(module, weight, changed, change.strength)
        for keeper in self._keepers:
            with asking(keeper):
                weight = keeper.place(own, network, name, weight)
                if not isinstance(weight, Tensor):
                    raise TypeError("place returned no tensor")
        if self.part is not None:
            weight = self.part.keep_rows(network, name, weight)
        return weight

    def _merge_tied(self, network: nn.Module) -> None:
        """Merge what is for tied weights: after loading, it changes them together."""
        tied = tied_names(network)
        change = self._preset_of(network)
        late = {name: one for name, one in change.parameters.items() if name in tied}
        merge(network, late, change.strength)

    def _preset_of(self, network: nn.Module) -> "_PresetChange":
        if self._change is None:
            self._change = _PresetChange()
            if self.files is not None and self.files.preset is not None:
                preset = replace(self.files.preset, component=self.component.name)
                unused = self.unused_parameters
                loras = read_preset(preset, self.family, network, unused)
                changes: dict[str, Change] = {}
                for lora in loras:
                    changes = together(changes, by_weight(lora.layers), lora.merged)
                self._change = _PresetChange(changes, preset.scale, tuple(loras))
        return self._change


def read_preset(
    file: LoraFile, family: ModelFamily, network: nn.Module, unused: Collection[str]
) -> list[Lora]:
    """Read what a preset changes of the component that it names; see `read_lora`."""
    name = file.component
    shapes = {name: base_shapes(network)}
    return read_lora(file, family, shapes, {name: unused}, is_one_of_several=True)


@dataclass(frozen=True)
class _PresetChange:
    """What a preset changes of a network."""

    parameters: Mapping[str, Change] = field(default_factory=dict)
    """Parameter -> the change of it."""
    strength: float = 1.0
    loras: Sequence[Lora] = ()
    """What it was read from."""
