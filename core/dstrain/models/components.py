"""Components: which files are which, their configuration without weights, and how they
are loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as names_like
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from dstrain.models.formats import CheckpointFormat, LoraKeyFormat, Shapes
from dstrain.registry.family import ModelFamily


@dataclass(frozen=True)
class Files:
    """The files of one component: weights, or the one folder of a tokenizer; and their
    model id ('' if local).

    prefix: what the names of this component's weights begin with in the files; others
    there are other components'. layout: how they are arranged, if not as the network
    has them. preset: a LoRA file to merge into the weights.
    """

    paths: tuple[Path, ...]
    model_id: str = ""
    prefix: str = ""
    checkpoint_format: CheckpointFormat | None = None
    preset: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds them, where a configuration is looked for."""
        first = self.paths[0]
        return first if first.is_dir() else first.parent


class Match(NamedTuple):
    """How a component's weights are named in a file: after a prefix, in a layout (None:
    the network's own).
    """

    prefix: str
    checkpoint_format: CheckpointFormat | None


@dataclass(frozen=True)
class Component:
    """How a family finds and loads one component.

    folders: its folders in published layouts, that of diffusers first. originals:
    patterns of the names of its files where they are published in none of these. marks:
    patterns of state-dict names, all of which its files have; () for a tokenizer or
    processor, which is a folder. layouts: other arrangements of its weights. prefixes:
    what its names may begin with, where a file holds several components or is made for
    another program. published: model id -> configuration, for files without
    `config.json`. configure: config.json's content -> the configuration units borrow as
    `<name>_config`. infer: the network's own names and their shapes -> config.json's
    content, or None where they do not tell it. load: (files, configuration, dtype) ->
    the component. build: configuration -> the network, its weights random; by default
    as that does which `load` is a method of. lora: how LoRA files name its layers,
    where `lora_names.namings` has no default for a program, or another.
    """

    name: str
    folders: tuple[str, ...]
    load: Callable[[Files, Any, torch.dtype], Any]
    key_patterns: tuple[str, ...] = ()
    configure: Callable[[Mapping[str, Any]], Any] = dict
    published: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    infer: Callable[[Shapes], Mapping[str, Any] | None] | None = None
    formats: tuple[CheckpointFormat, ...] = ()
    prefixes: tuple[str, ...] = ()
    lora: tuple[LoraKeyFormat, ...] = ()
    original_filenames: tuple[str, ...] = ()
    build: Callable[[Any], Any] | None = None

    @property
    def builder(self) -> Callable[[Any], Any] | None:
        """How its network is built without files, for programs that need its shapes
        alone; None if nothing tells.
        """
        return self.build or getattr(
            getattr(self.load, "__self__", None), "build", None
        )

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of small files (tokenizer, processor) and has no
        weights.
        """
        return not self.key_patterns

    def is_in_folder(self, place: Path) -> bool:
        """Whether a folder is one of its folders in published layouts, whatever it lies
        in.
        """
        return any(
            place.parts[-len(Path(folder).parts) :] == Path(folder).parts
            for folder in self.folders
        )

    def is_published_as(self, pattern: str) -> bool:
        """Whether a pattern of a model id's files begins with one of its folders, or is
        for its original names.
        """
        inside = any(pattern.startswith(f"{folder}/") for folder in self.folders)
        return inside or any(
            fnmatchcase(pattern, name) for name in self.original_filenames
        )

    def accepts_config(self, content: Mapping[str, Any]) -> bool:
        """Whether this content of a config.json can be its configuration: where
        `configure` is a network's, that says.

        Files of several components may lie in one folder, with the config.json of one
        of them.
        """
        says = getattr(
            getattr(self.configure, "__self__", None), "accepts_config", None
        )
        return says is None or bool(says(content))

    def arrangement(self, names: list[str]) -> Match | None:
        """How this component's weights are named among the names in a file; None if
        they are not there.
        """
        if self.is_folder:
            return None
        arrangements = (
            *(
                (checkpoint_format, checkpoint_format.key_patterns)
                for checkpoint_format in self.formats
            ),
            (None, self.key_patterns),
        )
        for prefix in (*self.prefixes, ""):
            inside = [
                name.removeprefix(prefix) for name in names if name.startswith(prefix)
            ]
            for checkpoint_format, key_patterns in arrangements:
                if inside and all(names_like(inside, mark) for mark in key_patterns):
                    return Match(prefix, checkpoint_format)
        return None

    def same_keys_as(self, other: "Component") -> bool:
        """Whether no name in files of weights tells the two apart, as with experts that
        are one network twice.
        """
        alike = (self.key_patterns, self.formats, self.prefixes) == (
            other.key_patterns,
            other.formats,
            other.prefixes,
        )
        return alike and not self.is_folder


def components_of(family: ModelFamily) -> dict[str, Component]:
    """Return a family's components by name."""
    known: tuple[Component, ...] = family.load("components")
    return {component.name: component for component in known}
