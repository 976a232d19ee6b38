"""Group the layers of a LoRA file by the components that their names allow."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dstrain.lora.foreign.differences import DifferenceKey, split_differences
from dstrain.lora.key_names import PEFT_PREFIX, Prefix, narrowed, prefixes
from dstrain.lora.key_parser import Weights, parse_keys
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class Group:
    """The layers of a file whose names have the same beginning."""

    prefix: Prefix
    peft: bool
    """Whether peft's prefix comes before it."""
    layers: dict[str, Weights]
    """The rest of the name -> the layer."""
    differences: dict[DifferenceKey, Tensor]
    """The rest of the name -> the difference of a parameter."""

    @property
    def names(self) -> list[str]:
        """Return the rests of all names."""
        return [*self.layers, *map(str, self.differences)]


def groups_in(
    path: Path,
    tensors: Mapping[str, Tensor],
    family: ModelFamily,
) -> list[Group]:
    """Group the layers of a file by how their names begin, and by the components that may
    have layers of these names; raises what `parse_keys` raises.
    """
    known = prefixes(family)
    found: dict[tuple[Prefix, bool], Group] = {}

    def place(name: str) -> tuple[Group, str]:
        """Return the group that a name is of, and the rest of the name."""
        rest = name.removeprefix(PEFT_PREFIX)
        prefix = next(prefix for prefix in known if rest.startswith(prefix.text))
        own = rest.removeprefix(prefix.text)
        key = (narrowed(prefix, own, family), rest != name)
        group = found.setdefault(key, Group(*key, {}, {}))
        return group, own

    differences, others = split_differences(path, tensors)
    if others or not differences:
        for name, weights in parse_keys(path, others).items():
            group, rest = place(name)
            group.layers[rest] = weights
    for key, difference in differences.items():
        group, rest = place(key.layer)
        group.differences[key._replace(layer=rest)] = difference
    return _joined(list(found.values()), family.default_trainable)


def _joined(groups: list[Group], default: str) -> list[Group]:
    """Return groups of which those whose names say less of their component are part of
    one that says more: of several, that of the family's default component.
    """
    kept: list[Group] = []
    # The narrowest first.
    for group in sorted(groups, key=lambda one: len(one.prefix.components)):
        own = set(group.prefix.components)
        narrower = [
            one
            for one in kept
            if (one.prefix.text, one.peft) == (group.prefix.text, group.peft)
            and own.issuperset(one.prefix.components)
        ]
        if not narrower:
            kept.append(group)
            continue
        narrower.sort(key=lambda one: default not in one.prefix.components)
        narrower[0].layers.update(group.layers)
        narrower[0].differences.update(group.differences)
    return [one for one in groups if any(one is other for other in kept)]
