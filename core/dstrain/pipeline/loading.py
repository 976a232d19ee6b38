"""Load a component: each weight is put where it is kept as soon as it is read."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.console import get_logger
from dstrain.lora.key_names import base_shapes
from dstrain.lora.lokr import Layer
from dstrain.lora.merging import merge_layers, merged
from dstrain.lora.reader import read_lora
from dstrain.models.components import Component, Files
from dstrain.models.execution.blocks import repeated_blocks
from dstrain.models.execution.kept import AS_LOADED, last_blocks
from dstrain.models.execution.ram import stored_tensors
from dstrain.models.execution.tiles import Tiles
from dstrain.models.networks import (
    OwnRows,
    Place,
    PlaceRows,
    check_files,
    empty_component,
    place_buffers,
    place_weights,
    tied_names,
)
from dstrain.models.quantization.layers import LayerStore
from dstrain.registry.family import ModelFamily

logger = get_logger(__name__)
NO_LAYERS: Mapping[str, Layer] = MappingProxyType({})


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
    store: Place | None = None
    """Stores each weight of a network, on its device, in another form; by default as its
    files say that it is kept."""
    part: OwnRows | None = None
    """Takes the rows of weights that this process has; None for all."""
    tiles: Tiles | None = None
    """How a VAE computes a large image, if not as a whole."""
    _layers: Mapping[str, Layer] | None = field(default=None, init=False)
    """The preset's layers by parameter."""
    _swapped: tuple[str, ...] | None = field(default=None, init=False)
    """What the names of weights of swapped blocks begin with."""

    def __post_init__(self) -> None:
        kept = AS_LOADED if self.files is None else self.files.kept
        self._layer_store = LayerStore(kept, self.component.name)

    def load(self, configuration: Any, dtype: torch.dtype) -> Any:
        """Load the component; raises what its network raises, and `read_lora`.

        Args:
            configuration: From `Component.configure`; None for a tokenizer.
            dtype: The dtype of its weights as they are read.
        """
        assert self.files is not None
        load: Any = self.component.network.load
        if "place" in inspect.signature(load).parameters:
            place: Place = self.place
            if self.part is not None:
                place = PlaceRows(self.place, self._rows_to_read, self._take_rows)
            loaded = load(self.files, configuration, dtype, place=place)
        else:
            loaded = load(self.files, configuration, dtype)
            if isinstance(loaded, nn.Module):
                place_weights(loaded, self.place)
        if not isinstance(loaded, nn.Module):
            return loaded
        place_buffers(loaded, self.device)
        self._merge_tied(loaded)
        if self.tiles is not None:
            self.tiles.apply(loaded)
        if self.files.preset is not None:
            logger.info(f"preset {self.files.preset} merged into {self.component.name}")
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
            self._layers_of(network)
        self._layer_store.check(network)
        if self.tiles is not None:
            self.tiles.apply(network)
        return network.requires_grad_(False).eval().to("meta")

    def place(self, network: nn.Module, name: str, weight: Tensor) -> Tensor:
        """Move a weight to its device, merge its layer of the preset, and store it.

        One that lives in RAM is on the device only for that.
        """
        layer = self._layers_of(network).get(name)
        is_in_ram = self._is_in_ram(network, name)
        stays_as_it_is = (
            self.store is None
            and self.part is None
            and not self._layer_store.kept.methods
        )
        if is_in_ram and layer is None and stays_as_it_is:
            return weight
        weight = weight.to(self.device)
        if layer is not None and name not in tied_names(network):
            module = network.get_submodule(name.rpartition(".")[0])
            weight = merged(module, weight, layer)
        store = self.store or self._layer_store
        stored = store(network, name, weight)
        if self.part is not None:
            stored = self.part.keep_rows(network, name, stored)
        if is_in_ram:
            module = network.get_submodule(name.rpartition(".")[0])
            for tensor in (stored, *stored_tensors(module)):
                if not tensor.is_meta:
                    tensor.data = tensor.data.to("cpu")
        return stored

    def _rows_to_read(self, network: nn.Module, name: str) -> slice | None:
        """Return the rows of a weight that are read; None where all are needed, to store
        them or to merge a preset.
        """
        assert self.part is not None
        is_stored = self.store is not None or self._layer_store.kept.methods
        if is_stored or name in self._layers_of(network):
            return None
        return self.part.rows(network, name)

    def _take_rows(self, network: nn.Module, name: str, rows: Tensor) -> Tensor:
        assert self.part is not None
        return self.part.take_rows(network, name, rows.to(self.device))

    def _is_in_ram(self, network: nn.Module, name: str) -> bool:
        """Return whether a weight is of a block that is swapped, or of a component that
        is on its device only while it is used.
        """
        assert self.files is not None
        kept = self.files.kept
        if kept.offloaded or not kept.swapped_blocks:
            return kept.offloaded
        if self._swapped is None:
            last = last_blocks([*repeated_blocks(network)], kept.swapped_blocks)
            self._swapped = tuple(f"{block}." for block in last)
        return name.startswith(self._swapped)

    def _merge_tied(self, network: nn.Module) -> None:
        """Merge what is for weights that are one: where they are tied after loading, it
        changes them together.
        """
        tied = tied_names(network)
        layers = self._layers_of(network)
        late = {name: layer for name, layer in layers.items() if name in tied}
        merge_layers(
            network,
            {name.removesuffix(".weight"): layer for name, layer in late.items()},
        )

    def _layers_of(self, network: nn.Module) -> Mapping[str, Layer]:
        if self._layers is None:
            self._layers = NO_LAYERS
            if self.files is not None and self.files.preset is not None:
                name = self.component.name
                loras = read_lora(
                    self.files.preset,
                    self.family,
                    {name: base_shapes(network)},
                    name,
                    {name: self.unused_parameters},
                )
                self._layers = {
                    f"{layer}.weight": weights
                    for lora in loras
                    for layer, weights in lora.layers.items()
                }
        return self._layers
