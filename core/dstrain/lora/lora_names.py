"""The names of layers in LoRA files: what they may begin with, and what they stand for."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dstrain.config import LoraFile
from dstrain.lora.layer_names import (
    PEFT_PREFIX,
    KeyTable,
    Prefix,
    Rows,
    layers_of,
    prefix_of,
)
from dstrain.lora.layers import Change, Layer
from dstrain.lora.stored import StoredLayer, parse_keys
from dstrain.models import Shapes, components_of
from dstrain.models.components import Component
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class LoraSource:
    """A LoRA file and the networks that it may be for: arguments of `read_lora`."""

    file: LoraFile
    tensors: Mapping[str, Tensor]
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    """Component -> the shapes of its weights."""
    unused_parameters: Mapping[str, Collection[str]]
    is_one_of_several: bool = False

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.file.path


class Contents(NamedTuple):
    """What layers of a file change of a network, by its own names."""

    layers: dict[str, Layer]
    merged: Sequence[Mapping[str, Change]]
    """Changes that can only be merged into parameters; several may change one of them."""


@dataclass(frozen=True)
class Group:
    """The layers of a file whose names have the same beginning."""

    prefix: Prefix
    peft: bool
    """Whether peft's prefix comes before it."""
    layers: dict[str, StoredLayer]
    """The rest of the name -> the layer."""


class LoraNames:
    """The names of diffusers and peft; plugins subclass it for those of programs whose
    names follow from the formats of checkpoints.
    """

    def prefixes(self, family: ModelFamily) -> list[Prefix]:
        """Return known beginnings of layer names, longest first; the last is ''."""
        components: dict[str, list[str]] = {"": []}
        for component in components_of(family).values():
            if not component.is_folder:
                own = f"{prefix_of(component.name, family)}."
                components.setdefault(own, []).append(component.name)
                components[""].append(component.name)
        known = [Prefix(text, tuple(names)) for text, names in components.items()]
        return sorted(known, key=lambda prefix: len(prefix.text), reverse=True)

    def parse(
        self, path: Path, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, StoredLayer]:
        """Return the layers of a file by their names there; raises StateError for what is
        of no layer, damaged or incomplete.
        """
        return parse_keys(path, tensors)

    def arranged(self, groups: list[Group], family: ModelFamily) -> list[Group]:
        """Return groups of which each is of one component."""
        return groups

    def alpha_is_rank(self, source: LoraSource) -> bool:
        """Return whether a file that states no alpha means the rank."""
        return False

    def tables(
        self, component: Component, family: ModelFamily, shapes: Shapes, prefix: Prefix
    ) -> Iterator[KeyTable]:
        """Yield what the names after a prefix may stand for."""
        yield {
            name: (Rows(name, 0, shape[0], 0),)
            for name, shape in layers_of(shapes).items()
        }

    def fits(self, layer: Any, rows: tuple[Rows, ...], shapes: Shapes) -> bool:
        """Return whether a layer of a file has the shape of what it stands for."""
        fits: bool = layer.fits(tuple(shapes[f"{rows[0].layer}.weight"]))
        return fits

    def contents(
        self, path: Path, layers: Mapping[str, Any], table: KeyTable, shapes: Shapes
    ) -> Contents:
        """Return the changes of a network that layers of a file stand for, each of which
        fits; raises StateError for what cannot be told apart.
        """
        own = {table[rest][0].layer: layer for rest, layer in layers.items()}
        return Contents(own, ())


def groups_in(
    path: Path, tensors: Mapping[str, Tensor], family: ModelFamily, names: LoraNames
) -> list[Group]:
    """Group the layers of a file by how their names begin, as `names` arranges them; raises
    what `names.parse` raises.
    """
    known = names.prefixes(family)
    found: dict[tuple[Prefix, bool], Group] = {}
    for name, layer in names.parse(path, tensors).items():
        rest = name.removeprefix(PEFT_PREFIX)
        prefix = next(prefix for prefix in known if rest.startswith(prefix.text))
        key = (prefix, rest != name)
        group = found.setdefault(key, Group(*key, {}))
        group.layers[rest.removeprefix(prefix.text)] = layer
    return names.arranged(list(found.values()), family)
