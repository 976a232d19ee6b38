"""Components: which files are which, their configuration without weights, and how they are loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True)
class Files:
    """The files of one component: weights, or the one folder of a tokenizer; and their model id ('' if local)."""

    paths: tuple[Path, ...]
    model_id: str = ""

    @property
    def folder(self) -> Path:
        """The folder that holds them, where a configuration is looked for."""
        first = self.paths[0]
        return first if first.is_dir() else first.parent


@dataclass(frozen=True)
class Component:
    """How a family finds and loads one component.

    folder: its folder in the published layout. marks: patterns of state-dict names, all of which its files have;
    () for a tokenizer or processor, which is a folder. published: model id -> configuration, for files without
    `config.json`. configure: config.json's content -> the configuration units borrow as `<name>_config`.
    infer: names and shapes in the files -> config.json's content, or None where they do not tell it.
    load: (files, configuration, dtype) -> the component.
    """

    name: str
    folder: str
    load: Callable[[Files, Any, torch.dtype], Any]
    marks: tuple[str, ...] = ()
    configure: Callable[[Mapping[str, Any]], Any] = dict
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    infer: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Any] | None] | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of small files (tokenizer, processor) and has no weights."""
        return not self.marks
