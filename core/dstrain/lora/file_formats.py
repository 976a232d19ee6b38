"""Read LoRA files of any format: what that is, which are known, which reads one."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from dstrain.config import LoraFile
from dstrain.config.options.output import OutputOptions
from dstrain.errors import DstrainError, StateError, UsageError
from dstrain.installed import described, how_to_have
from dstrain.lora.lora_names import LoraNames, LoraSource, groups_in
from dstrain.lora.lora_reading import read_layers
from dstrain.lora.stored import Lora
from dstrain.models import NATIVE, Config, Shapes
from dstrain.models.components import Component
from dstrain.models.formats import CheckpointFormat
from dstrain.models.weights import LORA_KEY
from dstrain.registry import ModelFamily, disabled_plugins, extensions_in_use, warn_once
from dstrain.storage import read_tensors


class LoraFormat:
    """The names of layers in the LoRA files of a program: plugins subclass it.

    A format that cannot write files leaves `has_names` as it is.
    """

    plugin: str = "dstrain"
    """The plugin that it is of, as errors name it; set by dstrain."""
    name: ClassVar[str] = ""
    """A value of --lora_format."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other values that mean the same."""
    title: ClassVar[str] = ""
    """The program, where a run says how to convert files for it."""
    fallback: ClassVar[bool] = False
    """Whether it is asked only about files that no other format reads."""
    names: ClassVar[LoraNames | None] = None
    """How its files name layers, unless it has a `read` of its own."""

    def reads(self, keys: Collection[str], header: Mapping[str, str]) -> bool:
        """Return whether a file is in this format, by its keys and its header."""
        return False

    def components(
        self, path: Path, tensors: Mapping[str, Tensor], family: ModelFamily
    ) -> list[tuple[str, ...]]:
        """Return the components that layers of a file may be of: for each group of names
        that begin alike, those that they allow.
        """
        if self.names is None:
            return [tuple(family.lora_prefixes)]
        groups = groups_in(path, tensors, family, self.names)
        return [group.prefix.components for group in groups]

    def read(self, source: LoraSource) -> list[Lora]:
        """Return what a file holds of each component; raises StateError for a file that
        is damaged or does not fit, or ValueError to say the same without its path.
        """
        return read_layers(source, self.names or LoraNames())

    def asked_by(self, options: OutputOptions) -> str:
        """Return the option of the plugin that asks a run to save in this format, where
        --lora_format says none; '' if it is not given. `options` are those of a run.
        """
        return ""

    def has_names(
        self, component: Component, family: ModelFamily, lora_type: str
    ) -> bool:
        """Return whether it has names for layers of this type in a component."""
        return False

    def check(
        self,
        layers: Collection[str],
        lora_type: str,
        component: Component,
        family: ModelFamily,
        shapes: Shapes,
    ) -> None:
        """Raise UsageError, before training, for layers that cannot be written."""

    def write(
        self, lora: Lora, family: ModelFamily, shapes: Shapes
    ) -> dict[str, Tensor]:
        """Return the tensors of a file, with alpha / rank as part of the matrices."""
        raise NotImplementedError

    def weights(
        self, component: Component, family: ModelFamily, config: Config
    ) -> CheckpointFormat | None:
        """Return the names of all weights of a component with this configuration; None
        where the program has none.
        """
        return None

    def needs_export(
        self, component: Component, family: ModelFamily, lora_type: str, saved: str
    ) -> bool:
        """Return whether the program reads a file only once `dstrain export` has
        converted it.

        saved: The format that the file has.
        """
        return False


class OwnFormat(LoraFormat):
    """The names of diffusers and peft."""

    name = "diffusers"
    fallback = True
    names = LoraNames()

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
    """Return a format by one of its names; raises UsageError if it is not installed."""
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
    reading = formats_where("reads", keys, header)
    chosen = [one for one in reading if not one.fallback] or reading[:1]
    if len(chosen) > 1:
        names = " and ".join(one.name for one in chosen)
        what = f"is read by the formats {names}; disable one of their plugins"
        raise StateError(path, what)
    return chosen[0] if chosen else OWN


def is_lora_file(keys: Collection[str], header: Mapping[str, str]) -> bool:
    """Return whether a file has LoRA layers in any known format."""
    return any(map(LORA_KEY.search, keys)) or bool(formats_where("reads", keys, header))


def formats_where(method: str, *given: object) -> list[LoraFormat]:
    """Return the formats of which a method says yes; not one that fails, which is warned
    of once.
    """
    found = []
    for one in known_formats().values():
        try:
            if getattr(one, method)(*given):
                found.append(one)
        except (Exception, SystemExit) as error:
            what = f"its LoRA format {one.name} is left out: {described(error)}"
            warn_once([f"{one.plugin}: {what}"])
    return found


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
        what = f"its format, {one.name} of {one.plugin}, failed: {described(error)}"
        raise StateError(path, what) from error


def check_lora_file(path: Path) -> None:
    """Raise StateError for a LoRA file that does not exist, before any loading."""
    if not path.is_file():
        what = "is a folder, not a LoRA file" if path.is_dir() else "no such LoRA file"
        raise StateError(path, what)


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
        file: The file, and what the command says of it; its scale is for who uses the
            layers.
        family: The family it has to be of.
        networks: Component -> the shapes of its weights (`base_shapes`).
        unused_parameters: Component -> patterns of parameters that no loss reaches,
            whose layers the file may lack.
        is_one_of_several: Whether layers of other components are for another call.
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
