"""Read LoRA files of any format into layers with the network's own names.

The format is recognized by the keys. Every key is used, every layer is complete, and
nothing is guessed: what is ambiguous is refused by name.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dstrain.config import LoraFile
from dstrain.console import get_logger, number_of
from dstrain.errors import DstrainError, StateError, UsageError, first_few
from dstrain.installed import described, how_to_have
from dstrain.lora.file_formats import LoraFormat, LoraSource
from dstrain.lora.layer_names import layers_of, unused_layers
from dstrain.lora.reading.adapter_config import read_adapter_config
from dstrain.lora.reading.alphas import alphas_of
from dstrain.lora.reading.contents import Lora
from dstrain.lora.reading.groups import Group, groups_in
from dstrain.lora.reading.naming import Naming, find_naming, missing_advice
from dstrain.lora.reading.scheme import LoraNames
from dstrain.models import NATIVE, Config, Shapes
from dstrain.models.components import Component
from dstrain.models.formats import CheckpointFormat
from dstrain.registry import ModelFamily, disabled_plugins, extensions_in_use
from dstrain.storage import read_tensors

logger = get_logger(__name__)
LORA_KEY = re.compile(r"[._]lora_(A|B|down|up)\b")
"""What is in the key of a matrix of LoRA, of most programs."""


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
    source = LoraSource(
        file, tensors, header, family, networks, unused_parameters, is_one_of_several
    )
    found = format_of(path, tensors, header)
    with asking(found, path):
        loras = list(found.read(source))
    if not loras:
        what = f"has no layers for {file.component or 'what is loaded'}"
        raise StateError(path, what)
    return loras


def read_layers(source: LoraSource, names: LoraNames) -> list[Lora]:
    """Read a file whose names follow a scheme: what `LoraFormat.read` returns."""
    groups = groups_in(source.path, source.tensors, source.family, names)
    candidates = {name for group in groups for name in group.prefix.components}
    reader = _Reader(source, names, candidates)
    loras = [lora for lora in map(reader.read, groups) if lora is not None]
    found = [lora.component for lora in loras]
    if len(set(found)) < len(found):
        raise StateError(source.path, f"uses two naming schemes for {first_few(found)}")
    return loras


def components_in(
    path: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    family: ModelFamily,
) -> list[tuple[str, ...]]:
    """Return the components that layers of a file may be of, for each group of names that
    begin alike; raises StateError for keys that no format explains.
    """
    found = format_of(path, tensors, header)
    with asking(found, path):
        return found.components(path, tensors, family)


class OwnFormat(LoraFormat):
    """The names of diffusers and peft."""

    name = "diffusers"
    fallback = True

    def components(
        self, path: Path, tensors: Mapping[str, Tensor], family: ModelFamily
    ) -> list[tuple[str, ...]]:
        """Return those that the prefixes of diffusers stand for."""
        groups = groups_in(path, tensors, family, LoraNames())
        return [group.prefix.components for group in groups]

    def read(self, source: LoraSource) -> list[Lora]:
        """Return layers that have the network's own names."""
        return read_layers(source, LoraNames())

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        """Return True: the names are the network's own."""
        return True

    def weights(
        self, component: Component, family: ModelFamily, config: Config
    ) -> CheckpointFormat | None:
        """Return the network's own names."""
        return NATIVE


OWN = OwnFormat()


def known_formats() -> dict[str, LoraFormat]:
    """Return the formats by name: diffusers' first, then those of installed plugins."""
    offered = extensions_in_use().offered(
        "dstrain_lora_formats", LoraFormat, (OWN.name,)
    )
    return {OWN.name: OWN, **offered}


def format_named(name: str, flag: str = "--lora_format") -> LoraFormat:
    """Return a format by one of its names; raises UsageError for one that is not
    installed.
    """
    known = known_formats()
    for one in known.values():
        if name == one.name or name in one.aliases:
            return one
    what = f"expected one of {', '.join(known)}, got {name!r}"
    advice = how_to_have("lora_files", name, disabled_plugins())
    raise UsageError(flag, what, *filter(None, [advice]))


def format_of(
    path: Path, keys: Collection[str], header: Mapping[str, str]
) -> LoraFormat:
    """Return the format that reads a file: of diffusers and peft, if no plugin's does;
    raises StateError where several do.
    """
    reading = [one for one in known_formats().values() if _reads(one, keys, header)]
    chosen = [one for one in reading if not one.fallback] or reading[:1]
    if len(chosen) > 1:
        names = " and ".join(one.name for one in chosen)
        what = f"is read by the formats {names}; disable one of their plugins"
        raise StateError(path, what)
    return chosen[0] if chosen else OWN


def is_lora_file(keys: Collection[str], header: Mapping[str, str]) -> bool:
    """Return whether a file has LoRA layers in any known format."""
    if any(map(LORA_KEY.search, keys)):
        return True
    return any(_reads(one, keys, header) for one in known_formats().values())


def _reads(one: LoraFormat, keys: Collection[str], header: Mapping[str, str]) -> bool:
    """Return whether a format reads a file; not one that fails, which is warned of."""
    try:
        return bool(one.reads(keys, header))
    except Exception as error:
        logger.warning(f"LoRA format {one.name} is left out: {described(error)}")
        return False


@contextmanager
def asking(one: LoraFormat, path: Path) -> Iterator[None]:
    """Within, a format reads or writes a file: a ValueError is about the file, any other
    error of Python names the format; raises StateError.
    """
    try:
        yield
    except DstrainError:
        raise
    except ValueError as error:
        raise StateError(path, str(error)) from error
    except Exception as error:
        what = f"its format, {one.name}, failed: {described(error)}"
        raise StateError(path, what) from error


@dataclass(frozen=True)
class _Reader:
    """Turns the groups of one file into LoRAs."""

    source: LoraSource
    known: LoraNames
    candidates: Collection[str]
    """The components that any of its groups may be of."""

    @property
    def file(self) -> LoraFile:
        """Return the file, and what the command says of it."""
        return self.source.file

    @property
    def path(self) -> Path:
        """Return where the file is."""
        return self.file.path

    @property
    def header(self) -> Mapping[str, str]:
        """Return the file's header."""
        return self.source.header

    def read(self, group: Group) -> Lora | None:
        """Return the layers of a group by the network's own names; None if it is left
        out.
        """
        if self._is_left_out(group):
            return None
        named = self._named(group)
        naming = find_naming(
            group,
            self.file,
            named,
            self.source.family,
            self.source.networks,
            self.known,
        )
        name, table = naming.component, naming.layers
        if self.file.skip_missing:
            group = self._without_missing(group, naming)
            if not group.names:
                return None
        adapter = read_adapter_config(
            self.path, self.header, group.prefix.text, group.peft
        )
        alphas = alphas_of(group, self.file, self.header, adapter)
        shapes = self.source.networks[name]
        own = layers_of(shapes)
        stored = {}
        for rest, weights in group.layers.items():
            stored[rest] = weights.layer(alphas[rest])
            if not self.known.fits(stored[rest], table[rest], shapes):
                wanted = ", ".join(
                    f"{one.layer} {own.get(one.layer) or shapes[one.layer]}"
                    for one in table[rest]
                )
                have = self.known.shapes(stored[rest])
                what = f"does not fit {name}: {rest} has matrices of shapes {have}, for {wanted}"
                raise StateError(self.path, what, *missing_advice(self.file))
        layers, merged, differences = self.known.contents(
            self.path, stored, table, shapes
        )
        is_dora = any(one.type == "dora" for one in layers.values())
        if adapter is not None and adapter.dora and not is_dora:
            what = "its header says that it is DoRA, but no key has lengths of rows"
            raise StateError(self.path, what)
        targets: Sequence[str] = ()
        if self.header.get("component") == name and "targets" in self.header:
            targets = self.header["targets"].split(",")
        elif adapter is not None and all(
            rest in own for rest in group.layers if table[rest][0].layer in own
        ):
            targets = adapter.targets
        # A part of a fused layer without LoRA has no columns, and so is not in `layers`.
        present = {one.layer for rows in table.values() for one in rows}
        present |= unused_layers(self.source.unused_parameters.get(name, ()), shapes)
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
            if self.file.skip_missing and not self.source.is_one_of_several:
                self._warn_of(group.names, " or ".join(candidates))
            return self.file.skip_missing or self.source.is_one_of_several
        is_loaded = any(name in self.source.networks for name in candidates)
        if self.file.skip_missing and not is_loaded:
            self._warn_of(group.names, f"{' or '.join(candidates)}, not loaded")
            return True
        return False

    def _without_missing(self, group: Group, naming: Naming) -> Group:
        """Return a group without what its network lacks, or has in another shape."""
        shapes = self.source.networks[naming.component]
        layers = {
            rest: weights
            for rest, weights in group.layers.items()
            if rest in naming.layers
            and self.known.fits(weights.layer(1.0), naming.layers[rest], shapes)
        }
        kept = Group(group.prefix, group.peft, layers)
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
