"""LoRA files of any naming: read strictly, recognised by their keys, and turned into
layers of the network's own names.

Every key is used, every layer is complete, and nothing is guessed: what cannot be told
is refused by name.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

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
from dstrain.models.components import Component
from dstrain.models.formats import LoraKeyFormat, Shapes
from dstrain.registry.family import ModelFamily
from dstrain.storage.safetensors import read_tensors, refuse_folder

Alpha = float | Literal["rank"]
NO_ALPHA = "says no alpha; taken as the rank, as the reference (DiffSynth-Studio) has it in files of these names"


@dataclass(frozen=True)
class Lora:
    """One component's LoRA: its layers by the network's own names. notes: what was
    taken for granted, in words.
    """

    component: str
    layers: Mapping[str, LoraLayer]
    header: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Layers of a file whose names begin alike: what follows the beginning -> the
    layer. peft: after peft's prefix.
    """

    prefix: Prefix
    peft: bool
    layers: Mapping[str, LoraWeights]


@dataclass(frozen=True)
class ReadContext:
    """What a file is read against: the family, and the networks that may take it.

    networks: component -> its weights' shapes (`lora_names.shapes_of`). spare:
    component -> layers that no loss reaches, which a file may lack. into: the component
    that must take it, where something says so. alpha: that of every layer of a file
    that does not say it; 'rank': each layer's rank.
    """

    family: ModelFamily
    networks: Mapping[str, Shapes]
    optional_layers: Mapping[str, Collection[str]]
    into: str
    alpha: Alpha | None = None

    @property
    def components(self) -> dict[str, Component]:
        """The family's components by name."""
        known: tuple[Component, ...] = self.family.load("components")
        return {component.name: component for component in known}


def check_lora_file(path: Path | None) -> None:
    """Raise StateError, before anything is loaded, if a LoRA file is asked for that is
    not there.
    """
    if path is not None and not path.is_file():
        refuse_folder(path)
        raise StateError(str(path), "no such LoRA file")


def read_lora(
    path: Path,
    family: ModelFamily,
    networks: Mapping[str, Shapes],
    into: str = "",
    optional_layers: Mapping[str, Collection[str]] = MappingProxyType({}),
    alpha: Alpha | None = None,
) -> tuple[Lora, ...]:
    """Read a file of any naming, one `Lora` for each component that it has layers of;
    the arguments as in `Reading`.

    Raises StateError for a file of another family, of a component that is not there, or
    of several alike (two experts) of which its header names none; for keys that no
    naming explains; and for what `Lora` cannot hold. UsageError for an alpha that the
    file says itself.
    """
    context = ReadContext(family, networks, optional_layers, into, alpha)
    tensors, header = read_tensors(path)
    family_name = header.get("family", family.name)
    if family_name != family.name:
        raise StateError(
            str(path), f"is a LoRA for {family_name}, and this is {family.name}"
        )
    found: dict[str, Lora] = {}
    for group in groups_in(path, tensors, family):
        lora = _lora(path, group, header, context)
        if lora.component in found:
            what = f"names layers of {lora.component} in two ways; one of them begins with {group.prefix.text!r}"
            raise StateError(str(path), what)
        found[lora.component] = lora
    return tuple(found.values())


def groups_in(
    path: Path, tensors: Mapping[str, Tensor], family: ModelFamily
) -> list[Group]:
    """The layers of a file by how their names begin; raises what `parsed` raises."""
    known = prefixes(family)
    found: dict[tuple[Prefix, bool], dict[str, LoraWeights]] = {}
    for name, raw in parse_keys(path, tensors).items():
        rest = name.removeprefix(PEFT_PREFIX)
        prefix = next(prefix for prefix in known if rest.startswith(prefix.text))
        found.setdefault((prefix, rest != name), {})[rest.removeprefix(prefix.text)] = (
            raw
        )
    return [Group(prefix, peft, inside) for (prefix, peft), inside in found.items()]


def _lora(
    path: Path, group: Group, header: Mapping[str, str], context: ReadContext
) -> Lora:
    name, table = _component(path, group, header, context)
    adapter = read_adapter_config(path, header, group.prefix.text, group.peft)
    alphas, note = _alphas(path, group, adapter, header, context.alpha)
    own = layers_of(context.networks[name])
    width = _number(header.get("rank"))
    layers: dict[str, LoraLayer] = {}
    for rest, raw in group.layers.items():
        made = split_fused(
            LoraLayer(raw.down, raw.up, alphas[rest]), table[rest], width
        )
        whole = len(table[rest]) == 1 or len(raw.up) == table[rest][-1].stop
        if not whole or not all(_fits(one, own[layer]) for layer, one in made.items()):
            shapes = f"{tuple(raw.down.shape)} and {tuple(raw.up.shape)}"
            wanted = ", ".join(f"{rows.own} {own[rows.own]}" for rows in table[rest])
            raise StateError(
                str(path),
                f"does not fit {name}: {rest} has matrices of shapes {shapes}, for {wanted}",
            )
        layers |= made
    targets = (
        adapter.targets
        if adapter is not None and all(rest in own for rest in group.layers)
        else ()
    )
    if header.get("component") == name and "targets" in header:
        targets = tuple(header["targets"].split(","))
    optional_layers = {rows.own for rest in group.layers for rows in table[rest]} | set(
        context.optional_layers.get(name, ())
    )
    lacking = [
        one
        for one in own
        if one not in optional_layers
        and any(f".{one}".endswith(f".{end}") for end in targets)
    ]
    if lacking:
        what = f"is half a file: {len(lacking)} layers that its header names as targets have no LoRA in it"
        raise StateError(str(path), what, f"missing: {first_few(lacking)}")
    return Lora(name, layers, header, (f"{path}: {note}",) if note else ())


def split_fused(
    layer: LoraLayer, places: tuple[Rows, ...], width: int = 1
) -> dict[str, LoraLayer]:
    """A file's layer as those of the network that it is: the same `down`, and of `up`
    the rows of each. Exact.

    If every column of `up` acts on one of them alone, which is how several are written
    as one (`export.fused`), each gets its own columns back, `width` (the rank of each)
    at a time.
    """
    if len(places) == 1:
        return {places[0].own: layer}
    ups: dict[str, list[Tensor]] = {}
    for rows in sorted(places, key=lambda rows: rows.at):
        ups.setdefault(rows.own, []).append(layer.up[rows.start : rows.stop])
    whole = {
        own: torch.cat(parts) if len(parts) > 1 else parts[0]
        for own, parts in ups.items()
    }
    width = width if width and layer.rank % width == 0 else 1
    used = {
        own: up.flatten(1).bool().any(0).reshape(-1, width).any(1)
        for own, up in whole.items()
    }
    if len(whole) == 1 or torch.stack(list(used.values())).sum(0).max() != 1:
        return {
            own: LoraLayer(layer.down, up, layer.alpha) for own, up in whole.items()
        }
    parts = {}
    for own, columns in used.items():
        taken = columns.repeat_interleave(width)
        count = int(taken.sum())
        if count:
            parts[own] = LoraLayer(
                layer.down[taken],
                whole[own][:, taken],
                layer.alpha * count / layer.rank,
            )
    return parts


def _component(
    path: Path, group: Group, header: Mapping[str, str], context: ReadContext
) -> tuple[str, KeyTable]:
    """The component that a group is of, and the table of the names that it uses."""
    candidates = group.prefix.components
    named = header.get("component", "")
    if context.into:
        if context.into not in candidates or named not in ("", context.into):
            of = named or " or ".join(candidates)
            raise StateError(str(path), f"is a LoRA of {of}, and not of {context.into}")
        candidates = (context.into,)
    elif named in candidates and group.prefix.text:
        candidates = (named,)
    loaded = [name for name in candidates if name in context.networks]
    if not loaded:
        first = next(iter(group.layers))
        what = f"has {len(group.layers)} layers of {' or '.join(candidates)}, which is not here"
        raise StateError(str(path), what, f"the first is {group.prefix.text}{first}")
    tables = {name: _tables(name, group, context) for name in loaded}
    fitting = [name for name in loaded if tables[name]]
    if named in fitting:
        fitting = [named]
    if not fitting:
        raise StateError(str(path), *_unknown(group, loaded, context))
    if len(fitting) > 1:
        what = (
            f"fits {' and '.join(fitting)}, and its header does not say which it is of"
        )
        raise StateError(str(path), what)
    if len(tables[fitting[0]]) > 1:
        what = f"its {len(group.layers)} layers can be told in two ways: by {fitting[0]}'s own names and by others"
        raise StateError(str(path), what, f"layers: {first_few(group.layers)}")
    return fitting[0], tables[fitting[0]][0]


def _tables(name: str, group: Group, context: ReadContext) -> list[KeyTable]:
    """Tables in which every layer of a group is, each once: layouts that differ
    elsewhere alone count as one.
    """
    found: list[KeyTable] = []
    for table in _all_tables(name, group, context):
        if all(rest in table for rest in group.layers):
            part = {rest: table[rest] for rest in group.layers}
            if part not in found:
                found.append(part)
    return found


def _all_tables(name: str, group: Group, context: ReadContext) -> list[KeyTable]:
    every = key_tables(
        context.components[name], context.family, context.networks[name]
    ).values()
    if not group.prefix.underscored:
        return list(every)
    return [
        {
            underscored: table[dotted]
            for underscored, dotted in dotted_names(table).items()
        }
        for table in every
    ]


def _unknown(group: Group, loaded: Iterable[str], context: ReadContext) -> list[str]:
    """What to say of a group of which no naming of a loaded component has every layer."""
    every = [
        (name, table) for name in loaded for table in _all_tables(name, group, context)
    ]
    _, best = max(every, key=lambda pair: sum(rest in pair[1] for rest in group.layers))
    strange = [
        f"{group.prefix.text}{rest}" for rest in group.layers if rest not in best
    ]
    known = [example for name in loaded for example in _examples(name, context)]
    what = f"does not fit: {len(strange)} of its {len(group.layers)} layers are in no naming of {', '.join(loaded)}"
    return [what, f"the first: {first_few(strange)}", f"known: {'; '.join(known)}"]


def _examples(name: str, context: ReadContext) -> list[str]:
    component, shapes = context.components[name], context.networks[name]
    tables = key_tables(component, context.family, shapes)

    def example(naming: LoraKeyFormat) -> str:
        layer = next(
            (
                layer
                for layer in tables.get(naming.checkpoint_format, ())
                if re.search(r"\.\d+\.", layer)
            ),
            "...",
        )
        return f"{naming.program} {naming.prefixes[0]}{layer.replace('.', '_') if naming.underscored else layer}"

    return [example(naming) for naming in key_formats(component, context.family)]


def _alphas(
    path: Path,
    group: Group,
    adapter: AdapterConfig | None,
    header: Mapping[str, str],
    override: Alpha | None,
) -> tuple[dict[str, float], str]:
    """Each layer's alpha, and what there is to say about where it is from."""
    said = {
        rest: raw.alpha for rest, raw in group.layers.items() if raw.alpha is not None
    }
    lacking = [rest for rest in group.layers if rest not in said]
    if said and lacking:
        what = f"is half a file: {len(said)} of {len(group.layers)} layers have an alpha, the others none"
        raise StateError(str(path), what, f"without: {first_few(lacking)}")
    if adapter is not None:
        _check_said(path, group, adapter, said)
    if override is not None and (said or adapter is not None):
        raise UsageError("--alpha", f"has no effect: {path} says its alpha itself")
    if said:
        return said, ""
    if adapter is not None:
        return {rest: adapter.of(rest)[1] for rest in group.layers}, ""
    if override is not None:
        return {
            rest: float(len(raw.down)) if override == "rank" else override
            for rest, raw in group.layers.items()
        }, ""
    if all(raw.named for raw in group.layers.values()) and not group.peft:
        note = (
            "" if "family" in header and "alpha" in header else NO_ALPHA
        )  # ours has it in every layer's B
        return {rest: float(len(raw.down)) for rest, raw in group.layers.items()}, note
    place = (
        "adapter_config.json beside it"
        if group.peft
        else f"{ADAPTER_HEADER!r} in its header"
    )
    raise StateError(
        str(path),
        f"has neither `.alpha` keys nor {place}, so rank and alpha are unknown",
        "without alpha its effect may be many times too strong or too weak, and nothing would say so",
        "ai-toolkit, diffusion-pipe and older diffusers leave it out where it is the rank; if this is "
        "such a file, write it into one that says so:",
        f"dstrain export --alpha rank --format diffusers {path} OUTPUT",
    )


def _check_said(
    path: Path, group: Group, adapter: AdapterConfig, said: Mapping[str, float]
) -> None:
    for rest, raw in group.layers.items():
        rank, alpha = adapter.of(rest)
        if rank != len(raw.down) or not math.isclose(
            said.get(rest, alpha), alpha, rel_tol=1e-6
        ):
            have = f"rank {len(raw.down)}" + (
                f" and alpha {said[rest]:g}" if rest in said else ""
            )
            raise StateError(
                str(path),
                f"its header says rank {rank} and alpha {alpha:g} of {rest}, which has {have}",
            )


def _fits(layer: LoraLayer, shape: tuple[int, ...]) -> bool:
    down, up = tuple(layer.down.shape), tuple(layer.up.shape)
    ordinary = down[1:] == shape[1:] and up[0] == shape[0]
    embedding = len(shape) == len(down) == 2 and (down[1], up[0]) == shape
    return (ordinary or embedding) and up[1] == layer.rank and math.prod(up[2:]) == 1


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
