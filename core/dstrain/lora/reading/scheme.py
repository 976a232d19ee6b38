"""How files name layers: what `reader.read_layers` asks of names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dstrain.lora.layer_names import KeyTable, Prefix, Rows, layers_of, prefix_of
from dstrain.lora.layers import Layer
from dstrain.lora.reading.contents import MergedLayer
from dstrain.lora.reading.stored import StoredLayer, parse_keys
from dstrain.models import Shapes, components_of
from dstrain.models.components import Component
from dstrain.registry import ModelFamily


class Contents(NamedTuple):
    """What layers of a file change of a network, by its own names."""

    layers: dict[str, Layer]
    merged: Mapping[str, MergedLayer]
    differences: Mapping[str, Tensor]


class LoraNames:
    """The names of diffusers and peft; plugins subclass it for those of programs whose
    names follow from the formats of checkpoints.
    """

    def prefixes(self, family: ModelFamily) -> list[Prefix]:
        """Return every known beginning of layer names, the longest first; the last is '',
        for every component.
        """
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

    def place(self, name: str) -> tuple[str, str]:
        """Return what of a name in a file begins with a prefix, and what follows it."""
        return name, ""

    def tables(
        self, component: Component, family: ModelFamily, shapes: Shapes, prefix: Prefix
    ) -> Iterator[KeyTable]:
        """Yield what the names after a prefix may stand for."""
        yield {
            name: (Rows(name, 0, shape[0], 0),)
            for name, shape in layers_of(shapes).items()
        }

    def fits(self, stored: Any, rows: tuple[Rows, ...], shapes: Shapes) -> bool:
        """Return whether a layer of a file has the shape of what it stands for."""
        fits: bool = stored.fits(tuple(shapes[f"{rows[0].layer}.weight"]))
        return fits

    def contents(
        self, path: Path, layers: Mapping[str, Any], table: KeyTable, shapes: Shapes
    ) -> Contents:
        """Return the changes of a network that layers of a file stand for, each of which
        fits; raises StateError for what cannot be told apart.
        """
        own = {table[rest][0].layer: stored for rest, stored in layers.items()}
        return Contents(own, {}, {})

    def shapes(self, stored: Any) -> str:
        """Return the shapes of a layer of a file, for an error."""
        return " and ".join(str(tuple(one.shape)) for one in stored.parts().values())
