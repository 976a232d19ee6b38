"""Read LoRA files with any naming into layers with the network's own names.

The naming is recognized by the keys. Every key is used, every layer is complete, and
nothing is guessed: what is ambiguous is refused by name.
"""

import json
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from dstrain.config.options.lora import LoraType
from dstrain.console import get_logger, number_of
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora.fusing import divided
from dstrain.lora.key_names import (
    PEFT_PREFIX,
    KeyTable,
    Prefix,
    key_tables,
    layers_of,
    prefixes,
    unused_layers,
)
from dstrain.lora.key_parser import (
    ADAPTER_HEADER,
    AdapterConfig,
    Weights,
    is_folded,
    parse_keys,
    read_adapter_config,
)
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer
from dstrain.models.components import components_of
from dstrain.models.formats import Shapes
from dstrain.registry.family import ModelFamily
from dstrain.storage.files import unused_name
from dstrain.storage.safetensors import read_tensors

logger = get_logger(__name__)
Alpha = float | Literal["rank"]
NO_ALPHA = (
    "has no alpha; using the rank, as DiffSynth-Studio does in files with these names"
)


@dataclass(frozen=True)
class Lora:
    """The LoRA of one component."""

    component: str
    layers: Mapping[str, Layer]
    """The layers by the network's own names."""
    header: Mapping[str, str]

    @property
    def type(self) -> LoraType:
        """Return the type of the layers, which is the same for all."""
        return next(iter(self.layers.values())).type

    def trained_layers(self, path: Path) -> Mapping[str, Layer]:
        """Return the layers with the alpha that they were trained with, which the header
        records where it is part of B; raises StateError if the header has no valid one.

        Args:
            path: The file.
        """
        text = self.header.get("alpha")
        if text is None or not is_folded(self.header):
            return self.layers
        try:
            others = json.loads(self.header.get("alphas", "{}"))
            alphas = {name: float(others.get(name, text)) for name in self.layers}
        except (ValueError, TypeError, AttributeError, RecursionError):
            alphas = {"": math.nan}
        if not all(0 < alpha < math.inf for alpha in alphas.values()):
            given = self.header.get("alphas", text)
            raise StateError(path, f"its header has no valid alpha: {given!r}")
        return {
            # Of LoKr, whoever fills layers rescales them.
            name: layer.with_alpha(alphas[name])
            if isinstance(layer, LoraLayer)
            else layer
            for name, layer in self.layers.items()
        }


@dataclass(frozen=True)
class Group:
    """The layers of a file whose names have the same beginning."""

    prefix: Prefix
    peft: bool
    """Whether peft's prefix comes before it."""
    layers: Mapping[str, Weights]
    """The rest of the name -> the layer."""


def check_lora_file(path: Path) -> None:
    """Refuse a LoRA file that does not exist, before anything is loaded; raises
    StateError.
    """
    if not path.is_file():
        raise StateError(path, "no such LoRA file")


def read_lora(
    path: Path,
    family: ModelFamily,
    networks: Mapping[str, Shapes],
    component: str = "",
    unused_parameters: Mapping[str, Collection[str]] = MappingProxyType({}),
    alpha: Alpha | None = None,
) -> list[Lora]:
    """Read a file with any naming: one `Lora` for each component that it has layers of.

    Logs a warning if alpha had to be assumed. Raises StateError for a file of another
    family, of a component that is not loaded, or of one of several with the same keys
    that its header does not name; for keys that match no naming; and for a file that is
    damaged or incomplete. Raises UsageError for an alpha that the file states itself.

    Args:
        path: The file.
        family: The family it has to be of.
        networks: Component -> the shapes of its weights (`key_names.base_shapes`).
        component: The component that it has to be of, if that is known.
        unused_parameters: Component -> patterns of parameters that no loss reaches,
            whose layers the file may lack.
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
        unused_parameters=unused_parameters,
        alpha=alpha,
    )
    loras = [reader.read(group) for group in groups_in(path, tensors, family)]
    names = [lora.component for lora in loras]
    if len(set(names)) < len(names):
        raise StateError(path, f"uses two naming schemes for {first_few(names)}")
    return loras


def groups_in(
    path: Path,
    tensors: Mapping[str, Tensor],
    family: ModelFamily,
) -> list[Group]:
    """Group the layers of a file by how their names begin; raises what `parse_keys`
    raises.
    """
    known = prefixes(family)
    found: dict[tuple[Prefix, bool], dict[str, Weights]] = {}
    for name, weights in parse_keys(path, tensors).items():
        rest = name.removeprefix(PEFT_PREFIX)
        prefix = next(prefix for prefix in known if rest.startswith(prefix.text))
        layers = found.setdefault((prefix, rest != name), {})
        layers[rest.removeprefix(prefix.text)] = weights
    return [Group(prefix, peft, layers) for (prefix, peft), layers in found.items()]


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs; the fields are `read_lora`'s arguments."""

    path: Path
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    component: str
    unused_parameters: Mapping[str, Collection[str]]
    alpha: Alpha | None

    def read(self, group: Group) -> Lora:
        """Return the layers of a group by the network's own names."""
        name, table = self._naming(group)
        adapter = read_adapter_config(
            self.path, self.header, group.prefix.text, group.peft
        )
        alphas = self._alphas(group, adapter)
        shapes = self.networks[name]
        own = layers_of(shapes)
        layers: dict[str, Layer] = {}
        for rest, weights in group.layers.items():
            stored = weights.layer(alphas[rest])
            rows = table[rest]
            try:
                split = divided(stored, rows)
            except UsageError as error:
                raise StateError(self.path, f"{rest}: {error.what}") from error
            is_whole = len(rows) == 1
            if isinstance(stored, LoraLayer):
                is_whole = is_whole or len(stored.up) == rows[-1].stop
            if not is_whole or not all(split[one].fits(own[one]) for one in split):
                wanted = ", ".join(f"{one.layer} {own[one.layer]}" for one in rows)
                what = f"does not fit {name}: {rest} has matrices of shapes {_shapes(stored)}, for {wanted}"
                raise StateError(self.path, what)
            layers |= split
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
        return Lora(name, layers, self.header)

    def _naming(self, group: Group) -> tuple[str, KeyTable]:
        """Return the component that a group is of, and the table of the names it uses."""
        candidates = group.prefix.components
        named = self.header.get("component", "")
        wanted = self.component or named
        is_other = wanted not in candidates or named not in ("", wanted)
        if self.component and is_other:
            of = named or " or ".join(candidates)
            raise StateError(self.path, f"is a LoRA for {of}, not for {wanted}")
        if wanted in candidates:
            candidates = (wanted,)
        loaded = [name for name in candidates if name in self.networks]
        if not loaded:
            what = f"has {number_of(len(group.layers), 'layer')} for {' or '.join(candidates)}, which is not loaded"
            line = f"the first is {group.prefix.text}{next(iter(group.layers))}"
            raise StateError(self.path, what, line)
        namings: list[tuple[str, KeyTable]] = []
        unknown = list(group.layers)
        examples = []
        for name in loaded:
            component = components_of(self.family)[name]
            shapes = self.networks[name]
            underscored = group.prefix.underscored
            for table in key_tables(component, self.family, shapes, underscored):
                left = [rest for rest in group.layers if rest not in table]
                unknown = min(unknown, left, key=len)
                examples.append(next(iter(table), name))
                if left:
                    continue
                # Formats that differ in other layers alone are one naming.
                naming = name, {rest: table[rest] for rest in group.layers}
                if naming not in namings:
                    namings.append(naming)
        if not namings:
            count = f"{len(unknown)} of its {len(group.layers)} layers"
            what = f"does not fit: {count} match no naming of {', '.join(loaded)}"
            first = first_few(f"{group.prefix.text}{rest}" for rest in unknown)
            raise StateError(
                self.path, what, f"the first: {first}", f"known: {', '.join(examples)}"
            )
        if len(namings) > 1:
            fitting = " and ".join(dict.fromkeys(name for name, _ in namings))
            what = f"is ambiguous: it fits {len(namings)} namings of {fitting}"
            advice = "of several components, 'component' in its header names the one it is for"
            raise StateError(self.path, what, advice)
        return namings[0]

    def _alphas(
        self, group: Group, adapter: AdapterConfig | None
    ) -> Mapping[str, float]:
        """Return each layer's alpha."""
        ranks = {rest: float(weights.rank) for rest, weights in group.layers.items()}
        # Alpha says nothing of a LoKr of two whole matrices, nor that layer of others.
        layers = {rest: one for rest, one in group.layers.items() if one.has_product}
        if layers:
            return {**ranks, **self._alphas_of(layers, group.peft, adapter)}
        if self.alpha is not None:
            raise UsageError("--alpha", f"has no effect: {self.path} needs none")
        return ranks

    def _alphas_of(
        self, layers: Mapping[str, Weights], peft: bool, adapter: AdapterConfig | None
    ) -> Mapping[str, float]:
        """Return the alpha of each of these layers, all of which have one.

        Args:
            layers: The layers by the rest of their names.
            peft: As in `Group`.
            adapter: What peft's configuration says.
        """
        ranks = {rest: float(weights.rank) for rest, weights in layers.items()}
        stated = {
            rest: weights.alpha
            for rest, weights in layers.items()
            if weights.alpha is not None
        }
        if adapter is not None:
            for rest, rank in ranks.items():
                header_rank, header_alpha = adapter.of(rest)
                alpha = stated.setdefault(rest, header_alpha)
                is_same = math.isclose(alpha, header_alpha, rel_tol=1e-6)
                if rank != header_rank or not is_same:
                    what = f"its header says rank {header_rank} and alpha {header_alpha:g} of {rest}, "
                    what += f"which has rank {rank:g} and alpha {alpha:g}"
                    raise StateError(self.path, what)
        if is_folded(self.header):
            stated = stated or ranks
        if stated:
            if self.alpha is not None:
                what = f"has no effect: {self.path} states its own alpha"
                raise UsageError("--alpha", what)
            return stated
        if self.alpha == "rank":
            return ranks
        if self.alpha is not None:
            return dict.fromkeys(layers, self.alpha)
        if peft or not all(weights.named for weights in layers.values()):
            with_alpha = self.path.with_stem(f"{self.path.stem}-alpha")
            paths = (self.path, unused_name(with_alpha))
            raise StateError(
                self.path,
                "has neither `.alpha` keys nor adapter_config.json beside it "
                f"nor {ADAPTER_HEADER!r} in its header, so rank and alpha are unknown",
                "a wrong alpha makes its effect many times too strong or too weak, without any error",
                "ai-toolkit, diffusion-pipe and older diffusers leave alpha out if it equals the rank; convert such "
                "a file to one that states it:",
                shlex.join(["dstrain", "export", "--alpha", "rank", *map(str, paths)]),
            )
        # dstrain's own files with these names always had alpha / rank as part of B.
        if not {"family", "alpha"} <= self.header.keys():
            logger.warning(f"{self.path}: {NO_ALPHA}")
        return ranks


def _shapes(layer: Layer) -> str:
    if isinstance(layer, LoraLayer):
        return f"{tuple(layer.down.shape)} and {tuple(layer.up.shape)}"
    return " and ".join(str(tuple(one.shape)) for one in layer.parts().values())
