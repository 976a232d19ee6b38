"""`dstrain export`: a LoRA, or the weights of a component, as the files of another
program name them.

No model files are opened: the network's shapes follow from its configuration, which the
header of every file of ours has, or from the published configuration that fits.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from dstrain.errors import StateError, UsageError
from dstrain.lora.keys import KEY
from dstrain.lora.layers import (
    ADAPTER_HEADER,
    LoraConfig,
    LoraLayer,
    lora_header,
    lora_layers,
)
from dstrain.lora.names import Rows, key_formats, key_table, shapes_of
from dstrain.lora.reader import Alpha, Lora, read_lora
from dstrain.models.components import Component, Files
from dstrain.models.formats import (
    NATIVE,
    LoraKeyFormat,
    Shapes,
    from_checkpoint,
    to_checkpoint,
)
from dstrain.models.networks import empty_network
from dstrain.models.weights import recognise
from dstrain.registry.discovery import load_family
from dstrain.registry.family import ModelFamily
from dstrain.storage.safetensors import (
    CHECKSUM,
    read_tensors,
    with_checksum,
    write_tensors,
)


@dataclass(frozen=True)
class Converted:
    """What is written: tensors by key, the header, and what it is in words."""

    tensors: Mapping[str, Tensor]
    header: Mapping[str, str]
    words: str


def export(
    source: Path,
    output: Path,
    program: str,
    family_name: str | None = None,
    overwrite: bool = False,
    left_out: Collection[str] = (),
    alpha: Alpha | None = None,
) -> str:
    """Write a file as `program` names it, whole or not at all; returns what was
    written, in words.

    family: needed only if the file's header names none. alpha: of a LoRA file that does
    not say it. Raises UsageError if `output` exists and is not to be replaced or the
    program has no such file, StateError for a file that no naming explains,
    SystemFault.
    """
    tensors, header = read_tensors(source)
    header.pop(CHECKSUM, None)
    if output.is_dir() or (output.exists() and output.samefile(source)):
        kind = "a folder" if output.is_dir() else "INPUT itself"
        raise UsageError("OUTPUT", f"{output} is {kind}; give another name")
    if output.exists() and not overwrite:
        raise UsageError(
            "OUTPUT",
            f"{output} exists; what is there is left as it is",
            "give --overwrite to replace it",
        )
    name = family_name or header.get("family")
    if name is None:
        raise UsageError(
            "--model", f"is required: the header of {source} names no family"
        )
    if family_name is not None and header.get("family", family_name) != family_name:
        raise StateError(
            str(source),
            f"is of family {header['family']}, and --model is {family_name}",
        )
    family = load_family(name, left_out)
    is_lora = any(KEY.fullmatch(key) for key in tensors)
    if alpha is not None and not is_lora:
        raise UsageError("--alpha", f"has no effect: {source} is no LoRA")
    if is_lora:
        made = _lora(source, header, family, program, alpha)
    else:
        made = _whole(source, tensors, header, family, program)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(output, made.tensors, with_checksum(made.tensors, made.header))
    return f"{made.words}, {len(made.tensors)} keys; the first is {min(made.tensors)}"


def layers_in(lora: Lora, naming: LoraKeyFormat, shapes: Shapes) -> dict[str, Tensor]:
    """A LoRA as a program's file has it: key -> tensor. shapes: of the component's
    network.

    ComfyUI and kohya have lora_down, lora_up and alpha; the reference has no alpha, so
    alpha / rank is part of its lora_B; diffusers has it in the header
    (`adapter_header`).
    """
    found: dict[str, Tensor] = {}
    for name, places in key_table(naming.checkpoint_format, shapes).items():
        if any(rows.own in lora.layers for rows in places):
            layer = fuse(lora.layers, places)
            place = naming.prefixes[0] + (
                name.replace(".", "_") if naming.underscored else name
            )
            found |= {
                f"{place}.{key}": tensor
                for key, tensor in _keys(layer, naming.program).items()
            }
    return found


def fuse(layers: Mapping[str, LoraLayer], places: tuple[Rows, ...]) -> LoraLayer:
    """The one layer of a file that several of the network are: exact, block by block.

    Of n layers of rank r and alpha a it has rank n r and alpha n a, so that alpha /
    rank is the same; where their ratios differ, they are part of `up`, and alpha is the
    rank. Layers without LoRA have no block.
    """
    if len(places) == 1:
        return layers[places[0].own]
    parts = {rows.own: layers[rows.own] for rows in places if rows.own in layers}
    ratios = {layer.alpha / layer.rank for layer in parts.values()}
    rank = sum(layer.rank for layer in parts.values())
    first = next(iter(parts.values()))
    up = first.up.new_zeros(
        max(rows.stop for rows in places), rank, *first.up.shape[2:]
    )
    if len(ratios) > 1:
        up = up.float()
    at = 0
    for own, layer in parts.items():
        values = (
            layer.up
            if len(ratios) == 1
            else layer.up.float() * (layer.alpha / layer.rank)
        )
        for rows in (rows for rows in places if rows.own == own):
            up[rows.start : rows.stop, at : at + layer.rank] = values[
                rows.at : rows.at + rows.stop - rows.start
            ]
        at += layer.rank
    alpha = (
        sum(layer.alpha for layer in parts.values())
        if len(ratios) == 1
        else float(rank)
    )
    return LoraLayer(torch.cat([layer.down for layer in parts.values()]), up, alpha)


def save_lora_for(
    program: str,
    path: Path,
    network: Module,
    lora_config: LoraConfig,
    family: ModelFamily,
    metadata: Mapping[str, Any],
) -> None:
    """Write the trained LoRA weights as `save_lora` does, in the names of a program
    that has alpha in its keys.
    """
    components = {component.name: component for component in family.load("components")}
    naming = _naming(path, components[lora_config.component], family, program)
    tensors = layers_in(
        Lora(lora_config.component, lora_layers(network, lora_config), {}),
        naming,
        shapes_of(network),
    )
    write_tensors(
        path,
        tensors,
        with_checksum(tensors, lora_header(network, lora_config, metadata)),
    )


def adapter_header(lora: Lora, prefix: str) -> dict[str, Any]:
    """The fields of `lora_adapter_metadata`, from which diffusers takes rank and alpha."""
    ranks = {name: layer.rank for name, layer in lora.layers.items()}
    alphas = {name: layer.alpha for name, layer in lora.layers.items()}
    rank, alpha = max(ranks.values()), max(alphas.values())
    targets = (
        lora.header["targets"].split(",")
        if "targets" in lora.header
        else sorted(lora.layers)
    )
    fields: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": targets}
    patterns = {
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {
            name: value for name, value in alphas.items() if value != alpha
        },
    }
    fields |= {name: pattern for name, pattern in patterns.items() if pattern}
    return {f"{prefix}{name}": value for name, value in fields.items()}


def _keys(layer: LoraLayer, program: str) -> dict[str, Tensor]:
    if program == "diffusers":
        return {"lora_A.weight": layer.down, "lora_B.weight": layer.up}
    if program == "diffsynth":
        ratio = layer.alpha / layer.rank
        up = layer.up if ratio == 1 else layer.up.float() * ratio
        return {"lora_A.default.weight": layer.down, "lora_B.default.weight": up}
    return {
        "lora_down.weight": layer.down,
        "lora_up.weight": layer.up,
        "alpha": torch.tensor(layer.alpha),
    }


def _lora(
    source: Path,
    header: Mapping[str, str],
    family: ModelFamily,
    program: str,
    alpha: Alpha | None,
) -> Converted:
    loras, shapes = _read(source, header, family, alpha)
    components = {component.name: component for component in family.load("components")}
    tensors: dict[str, Tensor] = {}
    adapters: dict[str, Any] = {}
    for lora in loras:
        naming = _naming(source, components[lora.component], family, program)
        tensors |= layers_in(lora, naming, shapes[lora.component])
        adapters |= (
            adapter_header(lora, naming.prefixes[0]) if program == "diffusers" else {}
        )
    kept = {name: value for name, value in header.items() if name != ADAPTER_HEADER}
    if program == "diffusers":
        kept[ADAPTER_HEADER] = json.dumps(adapters, sort_keys=True)
    if program == "diffsynth" and "rank" in kept:
        kept["alpha"] = str(float(kept["rank"]))
    words = ", ".join(
        f"{len(lora.layers)} layers of {lora.component}" for lora in loras
    )
    words += (
        f", the expert of timesteps {header['timesteps']}"
        if "timesteps" in header
        else ""
    )
    return Converted(
        tensors,
        {"format": "pt", "family": family.name, **kept},
        f"LoRA on {words}, in {program}'s names",
    )


def _read(
    source: Path, header: Mapping[str, str], family: ModelFamily, alpha: Alpha | None
) -> tuple[tuple[Lora, ...], Mapping[str, Shapes]]:
    """Read a LoRA against the header's configuration, or the first published ones that
    it fits.
    """
    errors: list[StateError] = []
    for shapes in _networks(header, family):
        try:
            return read_lora(source, family, shapes, alpha=alpha), shapes
        except StateError as error:
            errors.append(error)
    if not errors:
        raise StateError(
            str(source),
            f"no configuration of {family.name} is known, in its header or published",
        )
    raise errors[0]


class BuiltShapes(Mapping[str, Shapes]):
    """The shapes of networks by component, each built, without weights, when it is
    first asked for.
    """

    def __init__(
        self, contents: Mapping[str, tuple[Component, Mapping[str, Any]]]
    ) -> None:
        """Take each component with the content of its configuration."""
        self.contents = contents
        self.built: dict[str, Shapes] = {}

    def __getitem__(self, name: str) -> Shapes:
        """Build the network, once."""
        if name not in self.built:
            self.built[name] = _shapes(*self.contents[name])
        return self.built[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the components, building none."""
        return iter(self.contents)

    def __len__(self) -> int:
        """How many components there are."""
        return len(self.contents)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a component, building none."""
        return name in self.contents


def _networks(
    header: Mapping[str, str], family: ModelFamily
) -> Iterator[Mapping[str, Shapes]]:
    """The shapes of a family's networks: of the header's configuration, and of each set
    of published ones.
    """
    known: tuple[Component, ...] = family.load("components")
    own, named = _configuration(header), header.get("component")
    taken = [component for component in known if component.name in family.lora_prefixes]
    chosen = [
        component for component in taken if _stands_for_twins(component, taken, named)
    ]
    buildable = [component for component in chosen if component.builder is not None]
    blind = [component.name for component in chosen if component.builder is None]
    if blind and (named in blind or not buildable):
        what = f"nothing tells the shapes of {' and '.join(blind)}, as a plain function loads it"
        raise UsageError(
            f"plugin {family.name}",
            what,
            "give Component(build=...), a function of the configuration",
        )
    names = list(
        dict.fromkeys(name for component in buildable for name in component.published)
    )
    seen: list[dict[str, Mapping[str, Any]]] = []
    for name in names or [""]:
        contents = {c.name: c.published[name] for c in buildable if name in c.published}
        if own is not None:
            contents = {**contents, header["component"]: own}
        if contents and contents not in seen:
            seen.append(contents)
            yield BuiltShapes(
                {c.name: (c, contents[c.name]) for c in buildable if c.name in contents}
            )


def _stands_for_twins(
    component: Component, among: Sequence[Component], named: str | None
) -> bool:
    """Whether of twins, whose layers have the same names, it is the one that the header
    names, else the first.
    """
    twins = [other.name for other in among if other.same_keys_as(component)]
    return component.name == (named if named in twins else twins[0])


def _configuration(header: Mapping[str, str]) -> Mapping[str, Any] | None:
    try:
        content = json.loads(header["config"]) if "component" in header else None
    except (KeyError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _shapes(component: Component, content: Mapping[str, Any]) -> Shapes:
    assert component.builder is not None  # `_networks` leaves others out
    return shapes_of(
        empty_network(partial(component.builder, component.configure(content)))
    )


def _naming(
    source: Path, component: Component, family: ModelFamily, program: str
) -> LoraKeyFormat:
    found = {naming.program: naming for naming in key_formats(component, family)}
    if program not in found:
        what = f"{program} has no names for LoRA on {component.name}, of which {source} has layers"
        raise UsageError(
            "--format", what, f"{component.name} has names in {', '.join(found)}"
        )
    return found[program]


def _whole(
    source: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    family: ModelFamily,
    program: str,
) -> Converted:
    """The weights of one component, whose own names they are read by."""
    if program == "kohya":
        raise UsageError(
            "--format",
            "kohya names LoRA files; the weights of a component are diffusers, comfyui or "
            "diffsynth",
        )
    found = recognise(Files((source,)), family.load("components"))
    ((component, *_), files), *others = found
    if others:
        raise StateError(
            str(source), f"holds {len(found)} components; export takes one"
        )
    inside = {
        key.removeprefix(files.prefix): value
        for key, value in tensors.items()
        if key.startswith(files.prefix)
    }
    checkpoint_format = files.checkpoint_format or NATIVE
    state = from_checkpoint(
        checkpoint_format,
        {
            key: value
            for key, value in inside.items()
            if not checkpoint_format.ignores(key)
        },
    )
    wanted = _naming(source, component, family, program).checkpoint_format
    made = state if wanted is None else to_checkpoint(wanted, state)
    if wanted is not None and any(
        not torch.equal(state[k], v) for k, v in from_checkpoint(wanted, made).items()
    ):
        raise StateError(str(source), f"{program}'s layout does not hold all of it")
    kept = {"format": "pt", "family": family.name, **header}
    return Converted(
        made, kept, f"{len(state)} weights of {component.name}, in {program}'s names"
    )
