"""Quantize the weights of components as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from dstrain.plugin import Identity, Keeper, KeeperRequest, UsageError, WeightSize
from torch import Tensor, nn

from dstrain_memory.options import MemoryOptions
from dstrain_memory.quantization.known_methods import known_methods, method_named
from dstrain_memory.quantization.layers import methods_of_layers
from dstrain_memory.quantization.method import QuantizationMethod
from dstrain_memory.quantization.requests import FP8_FLAG, parse_storage
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers


def quantizing(request: KeeperRequest, options: MemoryOptions) -> list[Keeper]:
    """Return the keeper that --quant_options and --fp8_models ask for, if they do.

    Raises UsageError for what names no component of the variant or one that is not
    loaded, for a method that is not known or not installed, and for what is trained.
    """
    requests = parse_storage(options.fp8_models, options.quant_options)
    fp8 = [one for one in requests if one.flag == FP8_FLAG]
    stored: dict[str, dict[StoredLayers, None]] = {}
    for one in requests:
        entry = StoredLayers(
            method_named(one.method, known_methods(), one.flag),
            one.only,
            one.excluded,
            one.flag,
            is_among_others=one.flag == FP8_FLAG and len(fp8) > 1,
        )
        for name in request.named(one.flag, one.what):
            stored.setdefault(name, {})[entry] = None
    if not stored:
        return []
    kept = {
        name: StoredComponent(tuple(entries), request.components[name].as_loaded)
        for name, entries in stored.items()
    }
    _check_use(kept, request)
    return [Quantize(kept)]


@dataclass(eq=False)
class Quantize(Keeper):
    """Quantizes the weights of linear layers, each as soon as it is on its device."""

    stored: Mapping[str, StoredComponent]
    """How the layers of each component are quantized."""
    _methods: WeakKeyDictionary[nn.Module, Mapping[str, QuantizationMethod]] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """The method of each layer, by network: found at its first weight, since layers that
    are stored are others."""

    def __post_init__(self) -> None:
        self.kind = "quantize"
        self.components = tuple(self.stored)
        self.flag = next(iter(self.stored.values())).methods[0].flag

    def describe(self, component: str) -> str:
        """Return how the component is quantized, in words."""
        return self.stored[component].describe()

    def identity(self, component: str, config: Mapping[str, Any] | None) -> Identity:
        """Return its methods and layers."""
        value = self.stored[component].identity
        return Identity("kept", value, f"how weights of {component} are stored")

    def recorded(self) -> Mapping[str, Any]:
        """Return the flags that quantize components so, by the components' names."""
        fp8 = []
        others = []
        for name, one in self.stored.items():
            for entry in one.methods:
                if entry.flag == FP8_FLAG:
                    fp8.append(name)
                else:
                    others.append(f"{name}:{entry.method.name}{entry.patterns}")
        return {
            "fp8_models": ",".join(fp8) or None,
            "quant_options": ";".join(others) or None,
        }

    def check(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Raise UsageError for patterns and layers that cannot be quantized so."""
        for name, network in networks.items():
            methods_of_layers(network, self.stored[name], name)

    def place(
        self, component: str, network: nn.Module, name: str, weight: Tensor
    ) -> Tensor:
        """Quantize a weight in the place of its layer; return what is kept of it.

        Raises what `methods_of_layers` raises.
        """
        layer, _, own = name.rpartition(".")
        if network not in self._methods:
            kept = self.stored[component]
            self._methods[network] = methods_of_layers(network, kept, component)
        method = self._methods[network].get(layer)
        if method is None or own != "weight":
            return weight
        linear = network.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        stored = method.store(linear, weight)
        stored.train(linear.training)
        network.set_submodule(layer, stored)
        return stored.weight

    def size(self, component: str, weight: WeightSize) -> int:
        """Return the bytes of a weight as its method stores it."""
        entries = (
            self.stored[component].methods_of(weight.layer) if weight.is_linear else []
        )
        if not entries:
            return weight.size
        rows, columns = weight.shape
        return entries[0].method.stored_bytes((rows, columns))


def _check_use(kept: Mapping[str, StoredComponent], request: KeeperRequest) -> None:
    """Refuse to quantize what a command does not load, what is trained, and what a training
    step uses by a method that no gradient passes.
    """
    in_full = {name.partition(".")[0]: name for name in request.full}
    for name, one in kept.items():
        first = one.methods[0]
        if name not in request.loaded:
            what = f"has no effect: {name} is not loaded"
            loaded = ", ".join(request.loaded)
            raise UsageError(first.flag, what, f"it loads {loaded}")
        if name in in_full:
            what = f"{name} is trained (--trainable_models {in_full[name]}), so its weights cannot be quantized"
            advice = f"train LoRA on it: --lora_base_model {name}"
            raise UsageError(first.flag, what, advice)
        for entry in one.methods if name in request.in_steps else ():
            if not entry.method.gives_gradient:
                what = f"{entry.method.name} gives no gradient, and training steps use {name}"
                raise UsageError(entry.flag, what, "use int8_block")
        # Where patterns leave layers as they are loaded, the layers themselves decide.
        whole = [entry for entry in one.methods if not entry.patterns]
        if name in request.needs_plain and whole:
            what = f"{request.lora[name]} needs weights as they are loaded; {whole[0].flag} quantizes {name}"
            raise UsageError("--lora_type", what, "train lora or dora")
