"""Decide which layers of a network a method quantizes."""

from collections.abc import Collection

from dstrain.plugin import UsageError, first_few, nearest
from torch import nn

from dstrain_memory.quantization.method import QuantizationMethod
from dstrain_memory.quantization.stored_layers import (
    StoredComponent,
    StoredLayers,
    matches,
)


def storable_layers(network: nn.Module) -> list[str]:
    """Return the names of the linear layers of a network whose weight is no other's."""
    # As transformers declares them: name -> the one that it is tied to.
    found = getattr(network, "all_tied_weights_keys", {})
    tied = {*found, *found.values()}
    return [
        name
        for name, layer in network.named_modules()
        # Others may be used otherwise: torch's attention reads the weight of its own last one.
        if type(layer) is nn.Linear and f"{name}.weight" not in tied
    ]


def methods_of_layers(
    network: nn.Module, kept: StoredComponent, component: str
) -> dict[str, QuantizationMethod]:
    """Return the method of each layer that is quantized, by the layer's name.

    Raises UsageError for a pattern that matches no layer, and for a layer that two
    methods would store.

    Args:
        network: The network, which needs no weights.
        kept: How it is kept.
        component: Its name, for errors.
    """
    every = storable_layers(network)
    layers = [name for name in every if kept.may_store(name)]
    for entry in kept.methods:
        if not layers and not entry.is_among_others:
            what = f"{component} has no linear layer that can be quantized"
            raise UsageError(entry.flag, f"{component}:{entry}: {what}")
        for pattern in entry.only:
            _check_pattern(pattern, layers, every, component, entry)
        for pattern in entry.excluded:
            # A layer that always stays as it is loaded is excluded indeed.
            if not any(matches(name, [pattern]) for name in every):
                _check_pattern(pattern, layers, every, component, entry)
    found = {}
    for name in layers:
        entries = kept.methods_of(name)
        for other in entries[1:]:
            if other.method != entries[0].method:
                raise UsageError(
                    other.flag,
                    f"both {component}:{entries[0]} and {component}:{other} quantize {name}",
                    f"exclude it from one of them: --quant_options {component}:METHOD/EXCLUDED,...",
                )
        if entries:
            found[name] = entries[0].method
    return found


def _check_pattern(
    pattern: str,
    layers: Collection[str],
    every: Collection[str],
    component: str,
    entry: StoredLayers,
) -> None:
    """Refuse a pattern that matches no layer, or none that may be quantized."""
    if any(matches(name, [pattern]) for name in layers):
        return
    text = f"{component}:{entry}"
    if any(matches(name, [pattern]) for name in every):
        what = (
            f"{pattern!r} is a layer of {component} that always stays as it is loaded"
        )
        raise UsageError(entry.flag, f"{text}: {what}", "leave it out")
    endings = {name.rpartition(".")[2] for name in layers}
    hint = nearest(pattern, {*endings, *layers})
    what = f"no linear layer of {component} matches {pattern!r}{hint}"
    raise UsageError(entry.flag, f"{text}: {what}", f"its layers: {first_few(layers)}")
