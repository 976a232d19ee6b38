"""Components: which files are theirs, their configuration, and how they are loaded."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import filter as names_like, fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from dstrain.config import LoraFile
from dstrain.graph import freeze
from dstrain.models.formats import NATIVE, CheckpointFormat, LoraKeyFormat, Shapes
from dstrain.registry import ModelFamily


@dataclass(frozen=True)
class Files:
    """The files of one component: weights, or the one folder of a tokenizer."""

    paths: tuple[Path, ...]
    model_id: str = ""
    """The published model that they are from; '' for local files."""
    prefix: str = ""
    """The beginning of its keys in the files; other keys are other components'."""
    checkpoint_format: CheckpointFormat = NATIVE
    """The format of the keys."""
    preset: LoraFile | None = None
    """A LoRA file to merge into the weights."""

    @property
    def folder(self) -> Path:
        """Return the folder that holds them, where a configuration is looked for."""
        first = self.paths[0]
        return first if first.is_dir() else first.parent

    def taken(self, names: Iterable[str]) -> Iterator[str]:
        """Yield those of the names in the files that the component has a use for."""
        for name in names:
            own = name.removeprefix(self.prefix)
            if name.startswith(self.prefix) and not self.checkpoint_format.ignores(own):
                yield name


class Network(Protocol):
    """How it is loaded. One of weights may have `DiffusersNetwork`'s methods."""

    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> Any:
        """Return the component that is in these files."""


@dataclass(frozen=True)
class Component:
    """How a family recognizes and loads one component."""

    name: str
    network: Network
    folder: str
    """Its folder in the layout of diffusers."""
    key_patterns: tuple[str, ...] = ()
    """Patterns of state-dict names, all of which its files have, and after '!' none; () for
    a tokenizer or processor, which is a folder.
    """
    other_folders: tuple[str, ...] = ()
    """Its folders in other published layouts."""
    original_filenames: tuple[str, ...] = ()
    """Patterns of its files' names where they are published in none of these."""
    expert_filenames: tuple[str, ...] = ()
    """Patterns, in lower case, of the names that its files have where no key and no folder
    tells them from those of a component with the same keys.
    """
    default_configs: Mapping[str, Path | Mapping[str, Any]] = field(
        default_factory=dict
    )
    """Model id -> its config.json or its content, for weights that come without one."""
    infer: Callable[[Shapes], Mapping[str, Any] | None] | None = None
    """(the network's own names and shapes) -> content of config.json, or None where
    they do not tell it. Without it, one of `default_configs` whose network has them.
    """
    formats: tuple[CheckpointFormat, ...] = ()
    """Other formats of its weights than the network's own."""
    prefixes: tuple[str, ...] = ()
    """What its names may begin with in files of several or of other programs."""
    as_loaded: tuple[str, ...] = ()
    """Patterns of linear layers that stay so where the others are stored in fewer bytes:
    embedders and final layers, where errors cost most.
    """
    modulation: tuple[str, ...] = ()
    """Patterns of linear layers whose results scale and shift those of others, so that an
    error in them is one in all that they scale: where the others are stored in 4 bits,
    these are better stored in 8.
    """
    version: int = 0
    """The version of what the family's code makes of its files: raise it when that is something
    else. With 0, the code counts of the module that declares it and of what that imports.
    """
    lora: tuple[LoraKeyFormat, ...] = ()
    """How LoRA files name its layers, where that of a program is not the default."""

    def __post_init__(self) -> None:
        freeze(self)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return its folders in published layouts, that of diffusers first."""
        return (self.folder, *self.other_folders)

    @cached_property
    def published(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the content of each published config.json, by model id."""
        return {
            name: json.loads(one.read_bytes()) if isinstance(one, Path) else one
            for name, one in self.default_configs.items()
        }

    def configure(self, content: Mapping[str, Any]) -> Any:
        """Return what functions get as `<name>_config` for a config.json."""
        configure = getattr(self.network, "configure", dict)
        return configure(content)

    @property
    def is_folder(self) -> bool:
        """Return whether it is a folder without weights (tokenizer, processor)."""
        return not self.key_patterns

    def is_in_folder(self, place: Path) -> bool:
        """Return whether a folder, wherever it is, is one of its published ones."""
        return any(place.match(folder) for folder in self.folders)

    def is_published_as(self, pattern: str) -> bool:
        """Return whether a pattern of a model id's files begins with one of its folders,
        or is for its original names.
        """
        patterns = [f"{folder}/*" for folder in self.folders]
        patterns += self.original_filenames
        return any(fnmatchcase(pattern, one) for one in patterns)

    def accepts_config(self, content: Mapping[str, Any]) -> bool:
        """Return whether this content of a config.json can be its configuration.

        Files of several components may lie in one folder, with the config.json of one
        of them.
        """
        accepts = getattr(self.network, "accepts_config", None)
        return accepts is None or bool(accepts(content))

    def part_of(self, files: Files, names: list[str]) -> Files | None:
        """Return its part of files with these keys; None if they have none of it."""
        if self.is_folder:
            return None
        for prefix in (*self.prefixes, ""):
            inside = [one[len(prefix) :] for one in names if one.startswith(prefix)]
            for one in (*self.formats, NATIVE):
                patterns = one.key_patterns or self.key_patterns
                if inside and all(_fits(inside, pattern) for pattern in patterns):
                    return replace(files, prefix=prefix, checkpoint_format=one)
        return None

    def same_keys_as(self, other: "Component") -> bool:
        """Return whether no name in files of weights tells the two apart, as with
        experts that are one network twice.
        """
        return (
            self.key_patterns == other.key_patterns
            and self.formats == other.formats
            and self.prefixes == other.prefixes
            and not self.is_folder
        )


def _fits(names: list[str], pattern: str) -> bool:
    """Return whether a pattern is of one of the names, or after '!' of none."""
    is_absent = pattern.startswith("!")
    return bool(names_like(names, pattern.removeprefix("!"))) != is_absent


def components_of(family: ModelFamily) -> dict[str, Component]:
    """Return a family's components by name."""
    known: tuple[Component, ...] = family.load("components")
    return {component.name: component for component in known}
