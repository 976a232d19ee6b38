"""Read LoRA files with any naming into layers with the network's own names.

The naming is recognized by the keys. Every key is used, every layer is complete, and
nothing is guessed: what is ambiguous is refused by name.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dstrain.config.fields import LoraFile
from dstrain.config.options.lora import LoraType
from dstrain.console import get_logger, number_of
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora.foreign.differences import (
    DifferenceKey,
    DifferenceTable,
    difference_fits,
    difference_table,
    own_differences,
    split_differences,
)
from dstrain.lora.foreign.products import LohaLayer, MergedLayer
from dstrain.lora.fusing import divided, merged_parts, split_fused
from dstrain.lora.key_names import (
    PEFT_PREFIX,
    KeyTable,
    Prefix,
    Rows,
    checkpoint_formats,
    key_table,
    layers_of,
    narrowed,
    prefixes,
    unused_layers,
    with_underscores,
)
from dstrain.lora.key_parser import (
    ADAPTER_HEADER,
    AdapterConfig,
    Weights,
    is_folded,
    is_of_ai_toolkit,
    parse_keys,
    read_adapter_config,
)
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer
from dstrain.models.components import components_of
from dstrain.models.formats import Shapes
from dstrain.registry.family import ModelFamily
from dstrain.storage.files import unused_name
from dstrain.storage.safetensors import read_tensors

logger = get_logger(__name__)
NO_ALPHA = (
    "has no alpha; using the rank, as DiffSynth-Studio and XLabs do with these names"
)


@dataclass(frozen=True)
class Lora:
    """The LoRA of one component."""

    component: str
    layers: Mapping[str, Layer]
    """The layers by the network's own names."""
    header: Mapping[str, str]
    merged: Mapping[str, MergedLayer] = field(default_factory=dict)
    """Changes of layers that can only be merged into their weights."""
    differences: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter -> what is added to it."""

    @property
    def type(self) -> LoraType:
        """Return the type of the layers, or of the first of them; `lora` for none."""
        return next((layer.type for layer in self.layers.values()), "lora")

    @property
    def by_type(self) -> dict[LoraType, dict[str, Layer]]:
        """Return the layers of each type: LyCORIS may give each layer its own."""
        found: dict[LoraType, dict[str, Layer]] = {}
        for name, layer in self.layers.items():
            found.setdefault(layer.type, {})[name] = layer
        return found

    def refuse_merged(self, path: Path, use: str) -> None:
        """Raise StateError if anything in it can only be merged into weights.

        Args:
            path: The file.
            use: What that cannot be, for the error.
        """
        names = [*self.merged, *self.differences]
        if names:
            kinds = {one.type for one in self.merged.values()}
            if self.differences:
                kinds.add("differences of whole weights")
            what = f"contains {' and '.join(sorted(kinds))}, which {use}"
            advice = (
                "--lora (generate) and --preset_lora_path merge it into the weights"
            )
            raise StateError(path, what, f"the first: {first_few(names)}", advice)

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
    layers: dict[str, Weights]
    """The rest of the name -> the layer."""
    differences: dict[DifferenceKey, Tensor]
    """The rest of the name -> the difference of a parameter."""

    @property
    def names(self) -> list[str]:
        """Return the rests of all names."""
        return [*self.layers, *map(str, self.differences)]


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
    reader = _Reader(
        file, header, family, networks, unused_parameters, is_one_of_several
    )
    groups = groups_in(path, tensors, family)
    loras = [lora for lora in map(reader.read, groups) if lora is not None]
    if not loras:
        what = f"has no layers for {file.component or 'what is loaded'}"
        raise StateError(path, what)
    names = [lora.component for lora in loras]
    if len(set(names)) < len(names):
        raise StateError(path, f"uses two naming schemes for {first_few(names)}")
    return loras


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
    return list(found.values())


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs; the fields are `read_lora`'s arguments."""

    file: LoraFile
    header: Mapping[str, str]
    family: ModelFamily
    networks: Mapping[str, Shapes]
    unused_parameters: Mapping[str, Collection[str]]
    is_one_of_several: bool

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
        naming = self._naming(group)
        name, table = naming.component, naming.layers
        if self.file.skip_missing:
            group = self._without_missing(group, naming)
            if not group.names:
                return None
        adapter = read_adapter_config(
            self.path, self.header, group.prefix.text, group.peft
        )
        alphas = self._alphas(group, adapter)
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
                raise StateError(self.path, what, *self._missing_advice())
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

    def _without_missing(self, group: Group, naming: "_Naming") -> Group:
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

    def _missing_advice(self) -> tuple[str, ...]:
        file = replace(self.file, skip_missing=True)
        return (f"to leave out what the model lacks, give {shlex.quote(file.typed)}",)

    def _naming(self, group: Group) -> "_Naming":
        """Return the component that a group is of, and the tables of the names it uses."""
        candidates = group.prefix.components
        names = group.names
        named = self.header.get("component", "")
        wanted = self.file.component or named
        # The header says which of those it is that the keys may mean.
        is_other = wanted not in candidates or (named in candidates and named != wanted)
        if self.file.component and is_other:
            of = named if named in candidates else " or ".join(candidates)
            raise StateError(self.path, f"is a LoRA for {of}, not for {wanted}")
        if wanted in candidates:
            candidates = (wanted,)
        loaded = [name for name in candidates if name in self.networks]
        if not loaded:
            what = f"has {number_of(len(names), 'layer')} for {' or '.join(candidates)}, which is not loaded"
            line = f"the first is {group.prefix.text}{names[0]}"
            raise StateError(self.path, what, line, *self._missing_advice())
        namings: list[_Naming] = []
        unknown = names
        examples = []
        for name in loaded:
            component = components_of(self.family)[name]
            shapes = self.networks[name]
            underscored = group.prefix.underscored
            for one in checkpoint_formats(component, self.family):
                table = key_table(one, shapes)
                table = with_underscores(table) if underscored else table
                others = difference_table(one, shapes, underscored)
                # Formats that differ in other layers alone are one naming.
                naming = _Naming(
                    name,
                    {rest: table[rest] for rest in group.layers if rest in table},
                    {key: others[key] for key in group.differences if key in others},
                )
                left = [rest for rest in names if rest not in naming.names]
                if len(left) < len(unknown):
                    unknown = left
                    namings = []
                examples.append(next(iter(table), name))
                if len(left) == len(unknown) < len(names) and naming not in namings:
                    namings.append(naming)
        if not namings or (unknown and not self.file.skip_missing):
            count = f"{len(unknown)} of its {len(names)} layers"
            what = f"does not fit: {count} match no naming of {', '.join(loaded)}"
            first = first_few(f"{group.prefix.text}{rest}" for rest in unknown)
            lines = [f"the first: {first}", f"known: {', '.join(examples)}"]
            if namings:
                lines += self._missing_advice()
            raise StateError(self.path, what, *lines)
        if len(namings) > 1:
            raise self._ambiguous(namings)
        return namings[0]

    def _ambiguous(self, namings: Sequence["_Naming"]) -> StateError:
        """Return the error of a group that has several readings."""
        fitting = list(dict.fromkeys(one.component for one in namings))
        what = (
            f"is ambiguous: it fits {len(namings)} namings of {' and '.join(fitting)}"
        )
        if len(fitting) == 1:
            return StateError(self.path, what)
        each = [replace(self.file, component=name).typed for name in fitting]
        files = [shlex.quote(one) for one in each]
        given = " or ".join(f"--lora {file}" for file in files)
        written = shlex.join(
            ["dstrain", "export", "--model", self.family.name, "--format", "diffusers"]
        )
        return StateError(
            self.path,
            what,
            f"say which component it is for: {given}",
            f"or write that into its header: {written} --component {fitting[-1]} INPUT OUTPUT",
        )

    def _alphas(
        self, group: Group, adapter: AdapterConfig | None
    ) -> Mapping[str, float]:
        """Return each layer's alpha."""
        ranks = {rest: float(weights.rank) for rest, weights in group.layers.items()}
        # Alpha says nothing of a LoKr of two whole matrices, nor that layer of others.
        layers = {rest: one for rest, one in group.layers.items() if one.has_product}
        if layers:
            return {**ranks, **self._alphas_of(layers, group.peft, adapter)}
        if self.file.alpha is not None:
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
        without = [rest for rest in layers if rest not in stated]
        if stated and without:
            what = f"incomplete LoRA file: {len(without)} of {len(layers)} layers lack an alpha"
            raise StateError(self.path, what, f"the first: {first_few(without)}")
        if stated:
            if self.file.alpha is not None:
                what = f"has no effect: {self.path} states its own alpha"
                raise UsageError("--alpha", what, "leave it, or @alpha, out")
            return stated
        if self.file.alpha == "rank":
            return ranks
        if self.file.alpha is not None:
            return dict.fromkeys(layers, self.file.alpha)
        if peft or not all(weights.named for weights in layers.values()):
            if is_of_ai_toolkit(self.header):
                return ranks
            with_alpha = self.path.with_stem(f"{self.path.stem}-alpha")
            paths = (self.path, unused_name(with_alpha))
            file = shlex.quote(replace(self.file, alpha="rank").typed)
            raise StateError(
                self.path,
                "has neither `.alpha` keys nor adapter_config.json beside it "
                f"nor {ADAPTER_HEADER!r} in its header, so rank and alpha are unknown",
                "a wrong alpha makes its effect many times too strong or too weak, without any error; ComfyUI and "
                "diffusers use B A as it is, as if alpha were the rank",
                f"if it is, say so where the file is named ({file}), or once for all, in a file of its own:",
                shlex.join(["dstrain", "export", "--alpha", "rank", *map(str, paths)]),
            )
        # dstrain's own files with these names always had alpha / rank as part of B.
        if not {"family", "alpha"} <= self.header.keys():
            logger.warning(f"{self.path}: {NO_ALPHA}")
        return ranks


@dataclass(frozen=True)
class _Naming:
    """How a file names what it changes of one component."""

    component: str
    layers: KeyTable
    differences: DifferenceTable

    @property
    def names(self) -> list[str]:
        """Return the names in the file, as `Group.names` does."""
        return [*self.layers, *map(str, self.differences)]


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
