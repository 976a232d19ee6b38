"""Read a LoRA file into layers by the network's own names: its layers are grouped by the
components that their names allow, and each group is of the one component that has them.

Every key is used, every layer is complete, and nothing is guessed: what is ambiguous is
refused by name.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dstrain.config import LoraFile
from dstrain.console import get_logger, number_of, shell_word
from dstrain.errors import StateError, first_few
from dstrain.lora.alphas import alphas_of, read_adapter_config
from dstrain.lora.layer_names import (
    PEFT_PREFIX,
    KeyTable,
    Prefix,
    Rows,
    layers_of,
    prefix_of,
    unused_layers,
)
from dstrain.lora.layers import Change, Layer
from dstrain.lora.stored import Lora, StoredLayer, parse_keys
from dstrain.models import Shapes, components_of
from dstrain.models.components import Component
from dstrain.registry import ModelFamily

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoraSource:
    """A LoRA file and the networks that it may be for; most fields are arguments of
    `read_lora`.
    """

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
    merged: Mapping[str, Change]


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
        return Contents(own, {})


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


def read_layers(source: LoraSource, names: LoraNames) -> list[Lora]:
    """Read a file whose names follow a scheme: what `LoraFormat.read` returns."""
    groups = groups_in(source.path, source.tensors, source.family, names)
    reader = _Reader(source, names, groups)
    loras = [lora for lora in map(reader.read, groups) if lora is not None]
    found = [lora.component for lora in loras]
    if len(set(found)) < len(found):
        raise StateError(source.path, f"uses two naming schemes for {first_few(found)}")
    return loras


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs."""

    source: LoraSource
    names: LoraNames
    groups: Sequence[Group]

    def read(self, group: Group) -> Lora | None:
        """Return the layers of a group by the network's own names; None if it is left
        out.
        """
        source, path = self.source, self.source.path
        if self._is_left_out(group):
            return None
        component, table = self._naming(group)
        shapes = source.networks[component]
        group = self._fitting(group, component, table)
        if not group.layers:
            return None
        # One type for all, or none that the configuration tells from another.
        kind = next(iter(group.layers.values())).type
        adapter = read_adapter_config(
            path, source.header, group.prefix.text, group.peft, kind.fields
        )
        alphas = alphas_of(
            group.layers,
            source.file,
            source.header,
            adapter,
            lambda: self.names.alpha_is_rank(source),
        )
        stored = {rest: one.layer(alphas[rest]) for rest, one in group.layers.items()}
        layers, merged = self.names.contents(path, stored, table, shapes)
        own = layers_of(shapes)
        targets: Sequence[str] = ()
        if source.header.get("component") == component and "targets" in source.header:
            targets = source.header["targets"].split(",")
        elif adapter is not None and stored.keys() <= own.keys():
            targets = adapter.targets
        # A part of a fused layer without LoRA has no columns, and so is not in `layers`.
        present = {one.layer for rows in table.values() for one in rows}
        present |= unused_layers(source.unused_parameters.get(component, ()), shapes)
        endings = tuple(f".{target}" for target in targets)
        absent = (one for one in own if one not in present)
        missing = [one for one in absent if f".{one}".endswith(endings)]
        if missing:
            count = number_of(len(missing), "layer")
            what = f"incomplete LoRA file: no LoRA for {count} that its header names as targets"
            raise StateError(path, what, f"missing: {first_few(missing)}")
        return Lora(component, layers, source.header, merged)

    def _is_left_out(self, group: Group) -> bool:
        """Return whether a group is of another component than is asked for, or than is
        loaded, and may be.
        """
        file = self.source.file
        candidates = group.prefix.components
        which = " or ".join(candidates)
        if file.component and file.component not in candidates:
            if file.skip_missing and not self.source.is_one_of_several:
                self._warn_of(group.layers, which)
            return file.skip_missing or self.source.is_one_of_several
        if file.skip_missing and not self.source.networks.keys() & {*candidates}:
            self._warn_of(group.layers, f"{which}, not loaded")
            return True
        return False

    def _naming(self, group: Group) -> tuple[str, KeyTable]:
        """Return the component that a group is of, and what its names stand for.

        Raises StateError where there is none, or more than one.
        """
        source, file = self.source, self.source.file
        candidates = group.prefix.components
        named = source.header.get("component", "")
        if named not in candidates and any(
            named in other.prefix.components for other in self.groups
        ):
            named = ""  # it is another group's
        wanted = file.component or named
        if file.component and (wanted not in candidates or named not in ("", wanted)):
            of = named or " or ".join(candidates)
            raise StateError(file.path, f"is a LoRA for {of}, not for {wanted}")
        if wanted in candidates:
            candidates = (wanted,)
        loaded = [name for name in candidates if name in source.networks]
        first = f"{group.prefix.text}{next(iter(group.layers))}"
        if not loaded:
            count = number_of(len(group.layers), "layer")
            what = f"has {count} for {' or '.join(candidates)}, which is not loaded"
            line = f"the first is {first}"
            raise StateError(file.path, what, line, *_missing_advice(file))
        unknown = list(group.layers)
        namings: list[tuple[str, KeyTable]] = []
        for name in loaded:
            for full in self.names.tables(
                components_of(source.family)[name],
                source.family,
                source.networks[name],
                group.prefix,
            ):
                # Formats that differ in other layers alone are one naming.
                table = {rest: full[rest] for rest in group.layers if rest in full}
                left = [rest for rest in group.layers if rest not in table]
                if len(left) < len(unknown):
                    unknown, namings = left, []
                if table and len(left) == len(unknown) and (name, table) not in namings:
                    namings.append((name, table))
        if not namings or (unknown and not file.skip_missing):
            count = f"{len(unknown)} of its {len(group.layers)} layers"
            what = f"does not fit: {count} match no naming of {', '.join(loaded)}"
            these = first_few(f"{group.prefix.text}{rest}" for rest in unknown)
            advice = _missing_advice(file) if namings else ()
            raise StateError(file.path, what, f"the first: {these}", *advice)
        if len(namings) > 1:
            fitting = list(dict.fromkeys(name for name, _ in namings))
            what = f"is ambiguous: it fits {len(namings)} namings of {' and '.join(fitting)}"
            each = [shell_word(replace(file, component=name).typed) for name in fitting]
            advice = (f"say which component it is for: {' or '.join(each)}",)
            raise StateError(file.path, what, *(advice if len(fitting) > 1 else ()))
        return namings[0]

    def _fitting(self, group: Group, component: str, table: KeyTable) -> Group:
        """Return a group without what its network lacks, or has in another shape, where
        that may be left out; raises StateError where it may not.
        """
        shapes = self.source.networks[component]
        file = self.source.file
        kept = {}
        for rest, stored in group.layers.items():
            if rest not in table:
                continue
            layer = stored.layer(None)
            if self.names.fits(layer, table[rest], shapes):
                kept[rest] = stored
            elif not file.skip_missing:
                own = layers_of(shapes)
                wanted = ", ".join(
                    f"{one.layer} {own.get(one.layer) or shapes[one.layer]}"
                    for one in table[rest]
                )
                parts = (str(tuple(one.shape)) for one in stored.parts.values())
                have = " and ".join(parts)
                what = f"does not fit {component}: {rest} has tensors of shapes {have}, for {wanted}"
                raise StateError(file.path, what, *_missing_advice(file))
        left = [rest for rest in group.layers if rest not in kept]
        if left:
            self._warn_of(left, f"layers that {component} lacks")
        return replace(group, layers=kept)

    def _warn_of(self, names: Collection[str], what: str) -> None:
        """Name what is left out, once for all blocks."""
        counts = Counter(re.sub(r"\d+", "*", name) for name in names)
        each = (k if n == 1 else f"{k} ({n})" for k, n in counts.items())
        listed = ", ".join(each)
        logger.warning(f"{self.source.path}: left out {len(names)}, {what}: {listed}")


def _missing_advice(file: LoraFile) -> tuple[str, ...]:
    """Say how to leave out what a network lacks of a file."""
    typed = replace(file, skip_missing=True).typed
    return (f"to leave out what the model lacks, give {shell_word(typed)}",)
