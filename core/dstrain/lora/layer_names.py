"""The names of a network's layers: how they begin in LoRA files, and which ones a pattern
of --lora_rank or --lora_alpha matches.

A pattern is one or several dotted parts of a layer's name, the last of which may be cut
short: `attn` matches `blocks.0.attn.to_q` and `blocks.0.attn1.to_q`. A number is always
whole: `blocks.1` does not match `blocks.12.attn.to_q`. `*` stands for anything. A name that
the family gives some of its layers, as targets do, stands for those.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from dstrain.errors import UsageError, first_few, nearest
from dstrain.models import Shapes
from dstrain.registry import ModelFamily

Number = TypeVar("Number", int, float)
PEFT_PREFIX = "base_model.model."
"""What peft's own files put before every name."""


class Rows(NamedTuple):
    """Rows of a layer in a file that are rows of one of the network's layers."""

    layer: str
    start: int
    stop: int
    offset: int
    """The first of these rows in the network's layer."""


KeyTable = Mapping[str, tuple[Rows, ...]]
"""A layer's name in files -> the network's layers that it is, several if fused."""


class Prefix(NamedTuple):
    """A beginning of layer names, with the components it stands for: several if their
    layers have the same names.
    """

    text: str
    components: tuple[str, ...]
    underscored: bool = False
    """Whether '_' stands for '.' in what follows."""


def base_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's weights by name, as if it had no LoRA layers, and
    none of its weights were stored in another form.
    """
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    added: tuple[str, ...] = ()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and f"{name}.weight" in shapes:
            shapes[f"{name}.weight"] = (layer.out_features, layer.in_features)
        if hasattr(layer, "base_layer"):
            added += (f"{name}.",)
    # What peft has added to a layer lies beside the layer itself.
    return {
        name.replace(".base_layer.", "."): shape
        for name, shape in shapes.items()
        if not name.startswith(added) or ".base_layer." in name
    }


def layers_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the layers that can have LoRA, with the shapes of their weights."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    }


def prefix_of(component: str, family: ModelFamily) -> str:
    """Return what diffusers calls a component in LoRA files ('transformer')."""
    return family.lora_prefixes.get(component, component)


def matching_names(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return names that match a pattern; '{last}' is the highest index there."""
    found: dict[str, None] = {}
    for pattern in patterns:
        before, mark, after = pattern.partition("{last}")
        if mark:
            index = re.compile(re.escape(before) + r"(\d+)(?:\.|$)")
            last = 0
            for name in names:
                hit = index.match(name)
                if hit is not None:
                    last = max(last, int(hit[1]))
            pattern = f"{before}{last}{after}"
        found |= dict.fromkeys(fnmatch.filter(names, pattern))
    return list(found)


def unused_layers(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """Return the layers that no loss reaches, given the names of all parameters."""
    found = fnmatch.filter(matching_names(patterns, names), "*.weight")
    return frozenset(name.removesuffix(".weight") for name in found)


def is_target(layer: str, pattern: str) -> bool:
    """Return whether a pattern of --lora_target_modules matches a layer: its name is the
    pattern or ends with '.' + pattern; `*` stands for anything.
    """
    return fnmatch.fnmatchcase(f".{layer}", f"*.{pattern}")


def matches(layer: str, pattern: str) -> bool:
    """Return whether a pattern of --lora_rank matches a layer."""
    ending = ".*" if pattern[-1].isdigit() else "*"
    return fnmatch.fnmatchcase(f".{layer}.", f"*.{pattern}{ending}")


def numbers_of_layers(
    flag: str,
    layers: Collection[str],
    numbers: Sequence[tuple[str, Number]],
    aliases: Mapping[str, tuple[str, ...]],
) -> dict[str, Number]:
    """Return the numbers of the layers that a pattern matches, of several that of the
    last.

    Raises UsageError for a pattern that no layer gets its number from.
    """
    found: dict[str, Number] = {}
    origins: dict[str, str] = {}
    for pattern, number in numbers:
        targets = aliases.get(pattern)
        own = [
            layer
            for layer in layers
            if (
                matches(layer, pattern)
                if targets is None
                else any(is_target(layer, target) for target in targets)
            )
        ]
        if not own:
            known = set(aliases)
            for layer in layers:
                known.update(part for part in layer.split(".") if not part.isdigit())
            what = f"{pattern!r} matches no layer with LoRA{nearest(pattern, known)}"
            raise UsageError(flag, what, f"they are: {first_few(layers)}")
        found |= dict.fromkeys(own, number)
        origins |= dict.fromkeys(own, pattern)
    for pattern, _ in numbers:
        if pattern not in origins.values():
            what = f"{pattern!r} has no effect: later patterns match all of its layers"
            raise UsageError(flag, what, "put the more general pattern first")
    return found
