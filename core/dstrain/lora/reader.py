"""Read LoRA files with any naming into layers with the network's own names.

The naming is recognised by the keys. Every key is used, every layer is complete, and
nothing is guessed: what is ambiguous is refused by name.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from dstrain.errors import StateError, UsageError
from dstrain.lora.keys import (
    AdapterConfig,
    LoraWeights,
    parse_keys,
    read_adapter_config,
)
from dstrain.lora.layers import ADAPTER_HEADER, LoraLayer, first_few
from dstrain.lora.names import (
    PEFT_PREFIX,
    KeyTable,
    Prefix,
    Rows,
    dotted_names,
    key_formats,
    key_tables,
    layers_of,
    prefixes,
)
from dstrain.models.components import components_of
from dstrain.models.formats import Shapes
from dstrain.registry.family import ModelFamily
from dstrain.storage.safetensors import read_tensors

Alpha = float | Literal["rank"]
NO_ALPHA = (
    "has no alpha; using the rank, as DiffSynth-Studio does in files with these names"
)


@dataclass(frozen=True)
class Lora:
    """The LoRA of one component."""

    component: str
    layers: Mapping[str, LoraLayer]
    """The layers by the network's own names."""
    header: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What was assumed about the file, for the user to read."""


@dataclass(frozen=True)
class Group:
    """The layers of a file whose names have the same beginning."""

    prefix: Prefix
    peft: bool
    """Whether peft's prefix comes before it."""
    layers: Mapping[str, LoraWeights]
    """The rest of the name -> the layer."""


def check_lora_file(path: Path | None) -> None:
    """Refuse a LoRA file that does not exist, before anything is loaded; raises
    StateError.
    """
    if path is not None and not path.is_file():
        raise StateError(path, "no such LoRA file")


def read_lora(
    path: Path,
    family: ModelFamily,
    networks: Mapping[str, Shapes],
    component: str = "",
    optional_layers: Mapping[str, Collection[str]] = MappingProxyType({}),
    alpha: Alpha | None = None,
) -> tuple[Lora, ...]:
    """Read a file with any naming: one `Lora` for each component that it has layers of.

    Raises StateError for a file of another family, of a component that is not loaded,
    or of one of several with the same keys that its header does not name; for keys that
    match no naming; and for a file that is damaged or incomplete. Raises UsageError for
    an alpha that the file states itself.

    Args:
        path: The file.
        family: The family it has to be of.
        networks: Component -> the shapes of its weights (`names.shapes_of`).
        component: The component that it has to be of, if that is known.
        optional_layers: Component -> layers that no loss reaches, which the file may
            lack.
        alpha: Alpha of every layer if the file states none; 'rank' is each layer's
            rank.
    """
    tensors, header = read_tensors(path)
    recorded = header.get("family", family.name)
    if recorded != family.name:
        what = f"is a LoRA for family {recorded}, not for {family.name}"
        raise StateError(path, what)
    reader = _Reader(
        path=path,
        header=header,
        family=family,
        networks=networks,
        component=component,
        optional_layers=optional_layers,
        alpha=alpha,
    )
    found: dict[str, Lora] = {}
    for group in groups_in(path, tensors, family):
        lora = reader.read(group)
        if lora.component in found:
            what = f"names layers of {lora.component} in two ways; one of them begins with {group.prefix.text!r}"
            raise StateError(path, what)
        found[lora.component] = lora
    return tuple(found.values())


def groups_in(
    path: Path, tensors: Mapping[str, Tensor], family: ModelFamily
) -> list[Group]:
    """Group the layers of a file by how their names begin; raises what `parse_keys`
    raises.
    """
    known = prefixes(family)
    found: dict[tuple[Prefix, bool], dict[str, LoraWeights]] = {}
    for name, weights in parse_keys(path, tensors).items():
        rest = name.removeprefix(PEFT_PREFIX)
        prefix = next(prefix for prefix in known if rest.startswith(prefix.text))
        layers = found.setdefault((prefix, rest != name), {})
        layers[rest.removeprefix(prefix.text)] = weights
    return [Group(prefix, peft, layers) for (prefix, peft), layers in found.items()]


def split_fused(
    layer: LoraLayer, places: tuple[Rows, ...], width: int = 1
) -> dict[str, LoraLayer]:
    """Split a layer of a file exactly into those of the network that it stands for:
    each has the same `down`, and its own rows of `up`.

    If every column of `up` acts on one of them alone, which is how `export.fuse` writes
    several as one, each gets its own columns back, `width` (the rank of each) at a time.
    """
    if len(places) == 1:
        return {places[0].layer: layer}
    pieces: dict[str, list[Tensor]] = {}
    for rows in sorted(places, key=lambda rows: rows.offset):
        pieces.setdefault(rows.layer, []).append(layer.up[rows.start : rows.stop])
    ups = {name: torch.cat(parts) for name, parts in pieces.items()}
    if not width or layer.rank % width:
        width = 1
    used = {}
    for name, up in ups.items():
        columns = up.flatten(1).bool().any(0)
        used[name] = columns.reshape(-1, width).any(1)
    users = torch.stack(list(used.values())).sum(0)
    if len(ups) == 1 or users.max() != 1:
        return {
            name: LoraLayer(layer.down, up, layer.alpha) for name, up in ups.items()
        }
    layers = {}
    for name, blocks in used.items():
        columns = blocks.repeat_interleave(width)
        rank = int(columns.sum())
        if rank:
            up = ups[name][:, columns]
            alpha = layer.alpha * rank / layer.rank
            layers[name] = LoraLayer(layer.down[columns], up, alpha)
    return layers


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs; the fields are `read_lora`'s arguments."""

    path: Path
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    component: str
    optional_layers: Mapping[str, Collection[str]]
    alpha: Alpha | None

    def read(self, group: Group) -> Lora:
        """Return the layers of a group by the network's own names."""
        name, table = self._component(group)
        adapter = read_adapter_config(
            self.path, self.header, group.prefix.text, group.peft
        )
        alphas, note = self._alphas(group, adapter)
        own = layers_of(self.networks[name])
        rank = self.header.get("rank", "")
        width = int(rank) if rank.isdigit() else 0
        layers: dict[str, LoraLayer] = {}
        for rest, weights in group.layers.items():
            stored = LoraLayer(weights.down, weights.up, alphas[rest])
            places = table[rest]
            split = split_fused(stored, places, width)
            is_whole = len(places) == 1 or len(stored.up) == places[-1].stop
            if not is_whole or not all(_fits(split[one], own[one]) for one in split):
                shapes = f"{tuple(stored.down.shape)} and {tuple(stored.up.shape)}"
                wanted = ", ".join(f"{rows.layer} {own[rows.layer]}" for rows in places)
                what = f"does not fit {name}: {rest} has matrices of shapes {shapes}, for {wanted}"
                raise StateError(self.path, what)
            layers |= split
        targets: tuple[str, ...] = ()
        if self.header.get("component") == name and "targets" in self.header:
            targets = tuple(self.header["targets"].split(","))
        elif adapter is not None and all(rest in own for rest in group.layers):
            targets = adapter.targets
        # A part of a fused layer without LoRA has no columns, and so is not in `layers`.
        present = {rows.layer for places in table.values() for rows in places}
        present.update(self.optional_layers.get(name, ()))
        endings = tuple(f".{target}" for target in targets)
        missing = [
            one for one in own if one not in present and f".{one}".endswith(endings)
        ]
        if missing:
            what = f"incomplete LoRA file: {len(missing)} layers that its header names as targets have no LoRA in it"
            raise StateError(self.path, what, f"missing: {first_few(missing)}")
        notes = (f"{self.path}: {note}",) if note else ()
        return Lora(name, layers, self.header, notes)

    def _component(self, group: Group) -> tuple[str, KeyTable]:
        """Return the component that a group is of, and the table of the names it uses."""
        candidates = group.prefix.components
        named = self.header.get("component", "")
        if self.component:
            if self.component not in candidates or named not in ("", self.component):
                of = named or " or ".join(candidates)
                what = f"is a LoRA of {of}, and not of {self.component}"
                raise StateError(self.path, what)
            candidates = (self.component,)
        elif named in candidates and group.prefix.text:
            candidates = (named,)
        loaded = [name for name in candidates if name in self.networks]
        if not loaded:
            first = next(iter(group.layers))
            what = f"has {len(group.layers)} layers of {' or '.join(candidates)}, which is not loaded"
            line = f"the first is {group.prefix.text}{first}"
            raise StateError(self.path, what, line)
        tables = {name: self._fitting_tables(name, group) for name in loaded}
        fitting = [name for name in loaded if tables[name]]
        if named in fitting:
            fitting = [named]
        if not fitting:
            raise StateError(self.path, *self._describe_misfit(group, loaded))
        if len(fitting) > 1:
            what = f"fits {' and '.join(fitting)}, and its header names no component"
            raise StateError(self.path, what)
        table, *others = tables[fitting[0]]
        if others:
            what = f"the names of its {len(group.layers)} layers are ambiguous: {fitting[0]}'s own or another format's"
            raise StateError(self.path, what, f"layers: {first_few(group.layers)}")
        return fitting[0], table

    def _fitting_tables(self, name: str, group: Group) -> list[KeyTable]:
        """Return the parts of tables that have every layer of a group.

        Each is returned once: checkpoint formats may differ in other layers alone.
        """
        found: list[KeyTable] = []
        for table in self._tables(name, group):
            if all(rest in table for rest in group.layers):
                part = {rest: table[rest] for rest in group.layers}
                if part not in found:
                    found.append(part)
        return found

    def _tables(self, name: str, group: Group) -> list[KeyTable]:
        tables = list(self._key_tables(name).values())
        if not group.prefix.underscored:
            return tables
        found: list[KeyTable] = []
        for table in tables:
            names = dotted_names(table)
            found.append({form: table[dotted] for form, dotted in names.items()})
        return found

    def _key_tables(self, name: str) -> Mapping[Any, KeyTable]:
        return key_tables(
            components_of(self.family)[name], self.family, self.networks[name]
        )

    def _describe_misfit(self, group: Group, loaded: Iterable[str]) -> list[str]:
        """Return the message on a group that fits no naming of the loaded components."""
        unknown: list[str] = list(group.layers)
        examples: list[str] = []
        for name in loaded:
            for table in self._tables(name, group):
                left = [rest for rest in group.layers if rest not in table]
                unknown = min(unknown, left, key=len)
            examples += self._examples(name)
        first = first_few(f"{group.prefix.text}{rest}" for rest in unknown)
        what = f"does not fit: {len(unknown)} of its {len(group.layers)} layers match no naming of {', '.join(loaded)}"
        return [what, f"the first: {first}", f"known: {'; '.join(examples)}"]

    def _examples(self, name: str) -> list[str]:
        """Return the name of a layer in a numbered block, as each program has it."""
        tables = self._key_tables(name)
        examples = []
        for key_format in key_formats(components_of(self.family)[name], self.family):
            names = tables.get(key_format.checkpoint_format, ())
            numbered = (one for one in names if re.search(r"\.\d+\.", one))
            layer = next(numbered, "...")
            if key_format.underscored:
                layer = layer.replace(".", "_")
            examples.append(f"{key_format.program} {key_format.prefixes[0]}{layer}")
        return examples

    def _alphas(
        self, group: Group, adapter: AdapterConfig | None
    ) -> tuple[dict[str, float], str]:
        """Return each layer's alpha, and a note on where it is from, if that is assumed."""
        path, layers = str(self.path), group.layers
        stated = {
            rest: weights.alpha
            for rest, weights in layers.items()
            if weights.alpha is not None
        }
        ranks = {rest: len(weights.down) for rest, weights in layers.items()}
        if stated and len(stated) < len(layers):
            what = f"incomplete LoRA file: only {len(stated)} of {len(layers)} layers have an alpha"
            missing = (rest for rest in layers if rest not in stated)
            raise StateError(path, what, f"missing: {first_few(missing)}")
        if adapter is not None:
            self._check_stated(adapter, ranks, stated)
            stated = stated or {rest: adapter.of(rest)[1] for rest in layers}
        if stated and self.alpha is not None:
            raise UsageError("--alpha", f"has no effect: {path} states its own alpha")
        if stated:
            return stated, ""
        if isinstance(self.alpha, float | int):
            return dict.fromkeys(layers, float(self.alpha)), ""
        by_rank = {rest: float(rank) for rest, rank in ranks.items()}
        if self.alpha == "rank":
            return by_rank, ""
        if all(weights.named for weights in layers.values()) and not group.peft:
            # In files of dstrain's own that have these names, alpha / rank is part of B.
            is_own = "family" in self.header and "alpha" in self.header
            return by_rank, "" if is_own else NO_ALPHA
        place = f"{ADAPTER_HEADER!r} in its header"
        if group.peft:
            place = "adapter_config.json beside it"
        raise StateError(
            path,
            f"has neither `.alpha` keys nor {place}, so rank and alpha are unknown",
            "a wrong alpha makes its effect many times too strong or too weak, without any error",
            "ai-toolkit, diffusion-pipe and older diffusers leave alpha out if it equals the rank; write such "
            "a file into one that states it:",
            f"dstrain export --alpha rank --format diffusers {path} OUTPUT",
        )

    def _check_stated(
        self,
        adapter: AdapterConfig,
        ranks: Mapping[str, int],
        alphas: Mapping[str, float],
    ) -> None:
        """Refuse a header with other ranks or alphas than the keys."""
        for rest, actual in ranks.items():
            rank, alpha = adapter.of(rest)
            is_same = math.isclose(alphas.get(rest, alpha), alpha, rel_tol=1e-6)
            if rank == actual and is_same:
                continue
            have = f"rank {actual}"
            if rest in alphas:
                have += f" and alpha {alphas[rest]:g}"
            what = f"its header says rank {rank} and alpha {alpha:g} of {rest}, which has {have}"
            raise StateError(self.path, what)


def _fits(layer: LoraLayer, shape: tuple[int, ...]) -> bool:
    down, up = tuple(layer.down.shape), tuple(layer.up.shape)
    ordinary = down[1:] == shape[1:] and up[0] == shape[0]
    # An embedding's weight is (vocabulary, channels): the other way round.
    embedding = len(shape) == len(down) == 2 and (down[1], up[0]) == shape
    return (ordinary or embedding) and up[1] == layer.rank and math.prod(up[2:]) == 1
