"""Group the layers of a LoRA file by the components that their names allow."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dstrain.lora.layer_names import PEFT_PREFIX, Prefix, narrowed
from dstrain.lora.reading.scheme import LoraNames
from dstrain.lora.reading.stored import StoredLayer
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class Group:
    """The layers of a file whose names have the same beginning."""

    prefix: Prefix
    peft: bool
    """Whether peft's prefix comes before it."""
    layers: dict[str, StoredLayer]
    """The rest of the name -> the layer."""

    @property
    def names(self) -> list[str]:
        """Return the rests of all names."""
        return list(self.layers)


def groups_in(
    path: Path,
    tensors: Mapping[str, Tensor],
    family: ModelFamily,
    names: LoraNames,
) -> list[Group]:
    """Group the layers of a file by how their names begin, and by the components that may
    have layers of these names; raises what `names.parse` raises.
    """
    known = names.prefixes(family)
    found: dict[tuple[Prefix, bool], Group] = {}
    for name, weights in names.parse(path, tensors).items():
        rest = name.removeprefix(PEFT_PREFIX)
        layer, end = names.place(rest)
        prefix = next(prefix for prefix in known if layer.startswith(prefix.text))
        own = layer.removeprefix(prefix.text)
        key = (narrowed(prefix, own, family), rest != name)
        group = found.setdefault(key, Group(*key, {}))
        group.layers[own + end] = weights
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
    return [one for one in groups if any(one is other for other in kept)]
