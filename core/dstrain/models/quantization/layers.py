"""Decide which layers of a network a method stores, and store them as they are read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from dstrain.errors import UsageError, first_few, nearest
from dstrain.graph.quantization import QuantizationMethod
from dstrain.models.execution.kept import Kept, StoredLayers, matches
from dstrain.models.networks import tied_names

FLAG = "--quant_options"


def methods_of_layers(
    network: nn.Module,
    kept: Kept,
    component: str,
    unquantized: Collection[str] = (),
) -> dict[str, QuantizationMethod]:
    """Return the method of each layer that is stored, by the layer's name.

    Layers whose weight is also another's are left as they are. Raises UsageError for a
    pattern that matches no layer, and for a layer that two methods would store.

    Args:
        network: The network, which needs no weights.
        kept: How it is kept.
        component: Its name, for errors.
        unquantized: Patterns of the whole names of layers that no method stores.
    """
    if not kept.methods:
        return {}
    tied = tied_names(network)
    every = [
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" not in tied
    ]
    layers = [name for name in every if not _is_whole(name, unquantized)]
    found: dict[str, StoredLayers] = {}
    for entry in kept.methods:
        text = f"{component}:{entry}"
        if not layers:
            what = f"{component} has no linear layer that can be stored"
            raise UsageError(FLAG, f"{text}: {what}")
        for pattern in (*entry.only, *entry.excluded):
            _check_pattern(pattern, layers, every, component, text)
        for name in layers:
            if entry.only and not matches(name, entry.only):
                continue
            if matches(name, entry.excluded):
                continue
            other = found.setdefault(name, entry)
            if other.method != entry.method:
                raise UsageError(
                    FLAG,
                    f"both {component}:{other} and {text} store {name}",
                    "exclude it from one of them: COMPONENT:METHOD/EXCLUDED,...",
                )
    return {name: entry.method for name, entry in found.items()}


def weight_bytes(
    network: nn.Module, methods: Mapping[str, QuantizationMethod], itemsize: int
) -> dict[str, int]:
    """Return the bytes of each parameter of a network as it will be kept, by name; tied
    ones count once.

    Args:
        network: The network, which needs no weights.
        methods: The method of each layer that is stored.
        itemsize: Bytes of a number that is not stored.
    """
    sizes = {}
    for name, weight in network.named_parameters():
        layer, _, own = name.rpartition(".")
        sizes[name] = weight.numel() * itemsize
        if own == "weight" and layer in methods:
            rows, columns = weight.shape
            sizes[name] = methods[layer].stored_bytes((rows, columns))
    return sizes


@dataclass
class LayerStore:
    """Stores the weights of one network, each as soon as it is on its device."""

    kept: Kept
    component: str
    unquantized: Collection[str] = ()
    methods: Mapping[str, QuantizationMethod] | None = field(default=None, init=False)
    """The method of each layer that is stored."""

    def __call__(self, network: nn.Module, name: str, weight: Tensor) -> Tensor:
        """Store a weight in the place of its layer; return what is kept of it.

        Raises what `methods_of_layers` raises.
        """
        if self.methods is None:
            self.methods = self.check(network)
        layer, _, own = name.rpartition(".")
        method = self.methods.get(layer) if own == "weight" else None
        if method is None:
            return weight
        linear = network.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        stored = method.store(linear, weight)
        stored.train(linear.training)
        network.set_submodule(layer, stored)
        return stored.weight

    def check(self, network: nn.Module) -> Mapping[str, QuantizationMethod]:
        """Return the method of each layer of the network that is stored."""
        return methods_of_layers(network, self.kept, self.component, self.unquantized)


def _is_whole(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


def _check_pattern(
    pattern: str,
    layers: Collection[str],
    every: Collection[str],
    component: str,
    text: str,
) -> None:
    """Refuse a pattern that matches no layer, or none that may be stored."""
    if any(matches(name, [pattern]) for name in layers):
        return
    if any(matches(name, [pattern]) for name in every):
        what = (
            f"{pattern!r} is a layer of {component} that always stays as it is loaded"
        )
        raise UsageError(FLAG, f"{text}: {what}", "leave it out")
    endings = {name.rpartition(".")[2] for name in layers}
    hint = nearest(pattern, {*endings, *layers})
    what = f"no linear layer of {component} matches {pattern!r}{hint}"
    raise UsageError(FLAG, f"{text}: {what}", f"its layers: {first_few(layers)}")
