"""Find the component that layers of a LoRA file are of, by the names that they have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dstrain.config import LoraFile
from dstrain.console import number_of, shell_command, shell_word
from dstrain.errors import StateError, first_few
from dstrain.lora.layer_names import KeyTable
from dstrain.lora.reading.groups import Group
from dstrain.lora.reading.scheme import LoraNames
from dstrain.models import Shapes, components_of
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class Naming:
    """How a file names what it changes of one component."""

    component: str
    layers: KeyTable


def find_naming(
    group: Group,
    file: LoraFile,
    named: str,
    family: ModelFamily,
    networks: Mapping[str, Shapes],
    known: LoraNames,
) -> Naming:
    """Return the component that a group is of, and the table of the names it uses.

    Raises StateError where there is none, or more than one. The arguments are those of
    `read_lora`, the component that the file's header names, '' for none, and the names.
    """
    candidates = group.prefix.components
    names = group.names
    wanted = file.component or named
    is_other = wanted not in candidates or named not in ("", wanted)
    if file.component and is_other:
        of = named or " or ".join(candidates)
        raise StateError(file.path, f"is a LoRA for {of}, not for {wanted}")
    if wanted in candidates:
        candidates = (wanted,)
    loaded = [name for name in candidates if name in networks]
    if not loaded:
        what = f"has {number_of(len(names), 'layer')} for {' or '.join(candidates)}, which is not loaded"
        line = f"the first is {group.prefix.text}{names[0]}"
        raise StateError(file.path, what, line, *missing_advice(file))
    namings: list[Naming] = []
    unknown = names
    examples = []
    for name in loaded:
        component = components_of(family)[name]
        shapes = networks[name]
        for table in known.tables(component, family, shapes, group.prefix):
            # Formats that differ in other layers alone are one naming.
            naming = Naming(
                name, {rest: table[rest] for rest in group.layers if rest in table}
            )
            left = [rest for rest in names if rest not in naming.layers]
            if len(left) < len(unknown):
                unknown = left
                namings = []
            examples.append(next(iter(table), name))
            if len(left) == len(unknown) < len(names) and naming not in namings:
                namings.append(naming)
    if not namings or (unknown and not file.skip_missing):
        count = f"{len(unknown)} of its {len(names)} layers"
        what = f"does not fit: {count} match no naming of {', '.join(loaded)}"
        first = first_few(f"{group.prefix.text}{rest}" for rest in unknown)
        lines = [f"the first: {first}", f"known: {', '.join(examples)}"]
        if namings:
            lines += missing_advice(file)
        raise StateError(file.path, what, *lines)
    if len(namings) > 1:
        raise _ambiguous(namings, file, family)
    return namings[0]


def missing_advice(file: LoraFile) -> tuple[str, ...]:
    """Say how to leave out what a network lacks of a file."""
    typed = replace(file, skip_missing=True).typed
    return (f"to leave out what the model lacks, give {shell_word(typed)}",)


def _ambiguous(
    namings: Sequence[Naming], file: LoraFile, family: ModelFamily
) -> StateError:
    """Return the error of a group that has several readings."""
    fitting = list(dict.fromkeys(one.component for one in namings))
    what = f"is ambiguous: it fits {len(namings)} namings of {' and '.join(fitting)}"
    if len(fitting) == 1:
        return StateError(file.path, what)
    each = [replace(file, component=name).typed for name in fitting]
    files = [shell_word(one) for one in each]
    given = " or ".join(f"--lora {one}" for one in files)
    written = shell_command(
        ["dstrain", "export", "--model", family.name, "--format", "diffusers"]
    )
    return StateError(
        file.path,
        what,
        f"say which component it is for: {given}",
        f"or write that into its header: {written} --component {fitting[-1]} INPUT OUTPUT",
    )
