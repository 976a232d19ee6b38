"""Read the groups of a LoRA file into layers by the network's own names: each group is of
the one component that has its layers.

Every key is used, every layer is complete, and nothing is guessed: what is ambiguous is
refused by name.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dstrain.config import LoraFile
from dstrain.console import get_logger, number_of, shell_word
from dstrain.errors import StateError, first_few
from dstrain.lora.alphas import alphas_of, read_adapter_config
from dstrain.lora.layer_names import KeyTable, layers_of, unused_layers
from dstrain.lora.layers import together
from dstrain.lora.lora_names import Group, LoraNames, LoraSource, groups_in
from dstrain.lora.stored import Lora
from dstrain.models import components_of

logger = get_logger(__name__)


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
        """Return a group's layers by the network's names; None if it is left out."""
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
        return Lora(component, layers, source.header, together(*merged))

    def _is_left_out(self, group: Group) -> bool:
        """Return whether a group's component is not asked for, or not loaded."""
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
