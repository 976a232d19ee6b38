"""Read LoRA files with any naming into layers with the network's own names.

The naming is recognized by the keys. Every key is used, every layer is complete, and
nothing is guessed: what is ambiguous is refused by name.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dstrain.config import LoraFile
from dstrain.console import get_logger, number_of
from dstrain.errors import StateError, first_few
from dstrain.lora.foreign.differences import difference_fits, own_differences
from dstrain.lora.foreign.products import LohaLayer, MergedLayer
from dstrain.lora.fusing import divided, merged_parts, split_fused
from dstrain.lora.key_names import Rows, layers_of, unused_layers
from dstrain.lora.key_parser import read_adapter_config
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer
from dstrain.lora.reading.alphas import alphas_of
from dstrain.lora.reading.contents import Lora
from dstrain.lora.reading.groups import Group, groups_in
from dstrain.lora.reading.naming import Naming, find_naming, missing_advice
from dstrain.models import Shapes
from dstrain.registry import ModelFamily
from dstrain.storage import read_tensors

logger = get_logger(__name__)


def check_lora_file(path: Path, components: Collection[str] = ()) -> None:
    """Refuse a LoRA file that does not exist, before anything is loaded; raises
    StateError.

    components: The names that may stand before it with a '=', for the error.
    """
    if path.is_file():
        return
    name, equals, _ = str(path).partition("=")
    lines = []
    if equals and components and name.isidentifier():
        lines.append(f"{name!r} is no component: {', '.join(components)}")
    raise StateError(path, "no such LoRA file", *lines)


def read_lora(
    file: LoraFile,
    family: ModelFamily,
    networks: Mapping[str, Shapes],
    unused_parameters: Mapping[str, Collection[str]] = MappingProxyType({}),
    is_one_of_several: bool = False,
) -> list[Lora]:
    """Read a file with any naming: one `Lora` for each component that it has layers of.

    Logs a warning if alpha had to be assumed. Raises StateError for a file of another
    family, of a component that is not loaded, or of one of several with the same keys
    that its header does not name; for keys that match no naming; and for a file that is
    damaged or incomplete. Raises UsageError for an alpha that the file states itself.

    Args:
        file: The file, the component that it has to be of, if that is known, the alpha of
            its layers, if it states none, and whether to leave out what the networks
            lack, with a warning, as long as they have something of it. Its scale is for
            who uses the layers.
        family: The family it has to be of.
        networks: Component -> the shapes of its weights (`key_names.base_shapes`).
        unused_parameters: Component -> patterns of parameters that no loss reaches,
            whose layers the file may lack.
        is_one_of_several: Whether layers of other components than `file.component` are
            for another call.
    """
    path = file.path
    tensors, header = read_tensors(path)
    recorded = header.get("family", family.name)
    if recorded != family.name:
        what = f"is a LoRA for family {recorded}, not for {family.name}"
        raise StateError(path, what)
    groups = groups_in(path, tensors, family)
    reader = _Reader(
        file,
        header,
        family,
        networks,
        unused_parameters,
        is_one_of_several,
        {name for group in groups for name in group.prefix.components},
    )
    loras = [lora for lora in map(reader.read, groups) if lora is not None]
    if not loras:
        what = f"has no layers for {file.component or 'what is loaded'}"
        raise StateError(path, what)
    names = [lora.component for lora in loras]
    if len(set(names)) < len(names):
        raise StateError(path, f"uses two naming schemes for {first_few(names)}")
    return loras


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs; most fields are `read_lora`'s arguments."""

    file: LoraFile
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    unused_parameters: Mapping[str, Collection[str]]
    is_one_of_several: bool
    candidates: Collection[str]
    """The components that any of its groups may be of."""

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.file.path

    def read(self, group: Group) -> Lora | None:
        """Return the layers of a group by the network's own names; None if it is left
        out.
        """
        if self._is_left_out(group):
            return None
        named = self._named(group)
        naming = find_naming(group, self.file, named, self.family, self.networks)
        name, table = naming.component, naming.layers
        if self.file.skip_missing:
            group = self._without_missing(group, naming)
            if not group.names:
                return None
        adapter = read_adapter_config(
            self.path, self.header, group.prefix.text, group.peft
        )
        alphas = alphas_of(group, self.file, self.header, adapter)
        shapes = self.networks[name]
        own = layers_of(shapes)
        layers: dict[str, Layer] = {}
        merged: dict[str, MergedLayer] = {}
        for rest, weights in group.layers.items():
            stored = weights.layer(alphas[rest])
            rows = table[rest]
            if not _fits(stored, rows, own):
                wanted = ", ".join(f"{one.layer} {own[one.layer]}" for one in rows)
                what = f"does not fit {name}: {rest} has matrices of shapes {_shapes(stored)}, for {wanted}"
                raise StateError(self.path, what, *missing_advice(self.file))
            if isinstance(stored, LohaLayer) or (
                isinstance(stored, LokrLayer) and len(rows) > 1
            ):
                merged |= merged_parts(stored, rows)
            else:
                layers |= divided(stored, rows)
        differences = own_differences(
            self.path, group.differences, naming.differences, shapes
        )
        is_dora = any(one.type == "dora" for one in layers.values())
        if adapter is not None and adapter.dora and not is_dora:
            what = "its header says that it is DoRA, but no key has lengths of rows"
            raise StateError(self.path, what)
        targets: Sequence[str] = ()
        if self.header.get("component") == name and "targets" in self.header:
            targets = self.header["targets"].split(",")
        elif adapter is not None and all(rest in own for rest in group.layers):
            targets = adapter.targets
        # A part of a fused layer without LoRA has no columns, and so is not in `layers`.
        present = {one.layer for rows in table.values() for one in rows}
        present |= unused_layers(self.unused_parameters.get(name, ()), shapes)
        endings = tuple(f".{target}" for target in targets)
        missing = [
            one for one in own if one not in present and f".{one}".endswith(endings)
        ]
        if missing:
            layers_without = number_of(len(missing), "layer")
            what = f"incomplete LoRA file: no LoRA for {layers_without} that its header names as targets"
            raise StateError(self.path, what, f"missing: {first_few(missing)}")
        return Lora(name, layers, self.header, merged, differences)

    def _named(self, group: Group) -> str:
        """Return the component that the header names, '' where that is another group's."""
        named = self.header.get("component", "")
        is_anothers = named in self.candidates and named not in group.prefix.components
        return "" if is_anothers else named

    def _is_left_out(self, group: Group) -> bool:
        """Return whether a group is of another component than is asked for, or than is
        loaded, and may be.
        """
        candidates = group.prefix.components
        if self.file.component and self.file.component not in candidates:
            if self.file.skip_missing and not self.is_one_of_several:
                self._warn_of(group.names, " or ".join(candidates))
            return self.file.skip_missing or self.is_one_of_several
        is_loaded = any(name in self.networks for name in candidates)
        if self.file.skip_missing and not is_loaded:
            self._warn_of(group.names, f"{' or '.join(candidates)}, not loaded")
            return True
        return False

    def _without_missing(self, group: Group, naming: Naming) -> Group:
        """Return a group without what its network lacks, or has in another shape."""
        shapes = self.networks[naming.component]
        own = layers_of(shapes)
        layers = {
            rest: weights
            for rest, weights in group.layers.items()
            if rest in naming.layers
            and _fits(weights.layer(1.0), naming.layers[rest], own)
        }
        differences = {
            key: value
            for key, value in group.differences.items()
            if key in naming.differences
            and difference_fits(value, naming.differences[key], shapes)
        }
        kept = Group(group.prefix, group.peft, layers, differences)
        left = [name for name in group.names if name not in kept.names]
        if left:
            self._warn_of(left, f"layers that {naming.component} lacks")
        return kept

    def _warn_of(self, names: Sequence[str], what: str) -> None:
        """Name what is left out, once for all blocks."""
        counts = Counter(re.sub(r"\d+", "*", name) for name in names)
        listed = ", ".join(
            f"{name} ({count})" if count > 1 else name for name, count in counts.items()
        )
        logger.warning(f"{self.path}: left out {len(names)}, {what}: {listed}")


def _fits(
    layer: Layer | LohaLayer, rows: Sequence[Rows], own: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return whether a layer of a file has the shape of those that it stands for."""
    if isinstance(layer, LoraLayer):
        if len(rows) > 1 and len(layer.up) != rows[-1].stop:
            return False
        split = split_fused(layer, tuple(rows))
        return all(one.fits(own[name]) for name, one in split.items())
    if len(rows) == 1 and isinstance(layer, LokrLayer):
        return layer.fits(own[rows[0].layer])
    height, width = layer.shape
    return height == rows[-1].stop and all(
        own[one.layer][1:] == (width,) for one in rows
    )


def _shapes(layer: Layer | LohaLayer) -> str:
    if isinstance(layer, LoraLayer):
        return f"{tuple(layer.down.shape)} and {tuple(layer.up.shape)}"
    if isinstance(layer, LohaLayer):
        return str(layer.shape)
    return " and ".join(str(tuple(one.shape)) for one in layer.parts().values())
