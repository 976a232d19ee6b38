"""Components: which files are which, their configuration without weights, and how they are loaded."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as names_like
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

Shapes = Mapping[str, tuple[int, ...]]
"""Names of weights -> their shapes."""
Part = Callable[[Shapes, str], tuple[int, int | None]]
"""(the file's shapes, a name in it) -> the first row wanted of that tensor and the one after the last, or None."""


class Piece(NamedTuple):
    """Rows `start` to `stop` (along the first axis; by default all) of the tensor `name` in a file."""

    name: str
    start: int = 0
    stop: int | None = None


class Row(NamedTuple):
    """A line of a layout's table: the file's name for a module or weight of the network.

    Each `*` stands for a number, the same ones in the same order on both sides. What follows (`.weight`) is kept.
    Several rows may name the same `own`: it is their parts joined. part: which rows of the file's tensor; None: all.
    """

    own: str
    file: str
    part: Part | None = None


def nth_of(index: int, count: int) -> Part:
    """Part `index`, counted from 0, of `count` parts of equal size, such as the keys of a fused query, key, value."""
    return partial(_nth_of, index, count)


def _nth_of(index: int, count: int, shapes: Shapes, name: str) -> tuple[int, int]:
    rows = shapes[name][0]
    return index * rows // count, (index + 1) * rows // count


def same_configuration(content: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any]:
    """`Layout.configuration` of a layout that is published with config.json in the network's own terms."""
    return content


@dataclass(frozen=True)
class Layout:
    """Another arrangement of a network's weights than its own, as in original checkpoints.

    marks: patterns of names, all of which files in this layout have. rows: the table, or how it follows from the
    files' shapes; it holds for any width and depth. Names that no row knows are the network's own.
    ignored: patterns of names in such files that the network has no use for.
    configuration: (content of a config.json of this layout's publisher, own shapes or {} without files) -> content in
    the network's terms, or None if it is no such content. A config.json beside files of a layout without it, or of
    files whose names have a prefix, is left aside: it is another component's.
    """

    marks: tuple[str, ...]
    rows: tuple[Row, ...] | Callable[[Shapes], tuple[Row, ...]] = ()
    ignored: tuple[str, ...] = ()
    configuration: Callable[[Mapping[str, Any], Shapes], Mapping[str, Any] | None] | None = None

    def convert(self, shapes: Shapes) -> dict[str, tuple[Piece, ...]]:
        """Return what each of the network's weights is made of: its pieces, to be joined along the first axis.

        shapes: names in the file, without prefix. Axes of length 1 may be more or fewer than the network's.
        """
        table = [(place, row, _pattern(row.file)) for place, row in enumerate(self._rows(shapes))]
        found: dict[str, list[tuple[int, Piece]]] = {}
        for name in shapes:
            hits = [(place, row, hit) for place, row, pattern in table if (hit := pattern.fullmatch(name))]
            longest = max((len(row.file) for _, row, _ in hits), default=0)
            for place, row, hit in hits:
                if len(row.file) == longest:
                    piece = Piece(name, *(row.part(shapes, name) if row.part else ()))
                    found.setdefault(_filled(row.own, hit), []).append((place, piece))
            if not hits and not self.ignores(name):
                found[name] = [(0, Piece(name))]
        return {own: tuple(piece for _, piece in sorted(parts)) for own, parts in found.items()}

    def original(self, own: str, shapes: Shapes) -> str:
        """The name in such a file of one of the network's weights."""
        for row in sorted(self._rows(shapes), key=lambda row: -len(row.own)):
            if hit := _pattern(row.own).fullmatch(own):
                return _filled(row.file, hit)
        return own

    def ignores(self, name: str) -> bool:
        """Whether the network has no use for this name in a file."""
        return any(names_like([name], pattern) for pattern in self.ignored)

    def _rows(self, shapes: Shapes) -> tuple[Row, ...]:
        return self.rows(shapes) if callable(self.rows) else self.rows


@dataclass(frozen=True)
class LoraNaming:
    """How the LoRA files of one program name a component's layers.

    program: what `dstrain export --format` calls it. prefixes: what the names begin with; the first is the one written,
    '' for none. layout: whose names follow; None: the network's own. flat: there with '_' in the place of '.'.
    """

    program: str
    prefixes: tuple[str, ...]
    layout: Layout | None = None
    flat: bool = False


def _pattern(template: str) -> re.Pattern[str]:
    if not template:
        return re.compile(r"(?P<rest>.+)")
    return re.compile(re.escape(template).replace(r"\*", r"(\d+)") + r"(?P<rest>|\..+)")


def _filled(template: str, hit: re.Match[str]) -> str:
    numbers = iter(hit.groups()[:-1])
    name = re.sub(r"\*", lambda _: next(numbers), template)
    rest = hit["rest"]
    return rest.removeprefix(".") if not name else name + ("" if rest.startswith(".") or not rest else ".") + rest


@dataclass(frozen=True)
class Files:
    """The files of one component: weights, or the one folder of a tokenizer; and their model id ('' if local).

    prefix: what the names of this component's weights begin with in the files; others there are other components'.
    layout: how they are arranged, if not as the network has them. preset: a LoRA file to merge into the weights.
    """

    paths: tuple[Path, ...]
    model_id: str = ""
    prefix: str = ""
    layout: Layout | None = None
    preset: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds them, where a configuration is looked for."""
        first = self.paths[0]
        return first if first.is_dir() else first.parent


class Arrangement(NamedTuple):
    """How a component's weights are named in a file: after a prefix, in a layout (None: the network's own)."""

    prefix: str
    layout: Layout | None


@dataclass(frozen=True)
class Component:
    """How a family finds and loads one component.

    folders: its folders in published layouts, that of diffusers first. originals: patterns of the names of its files
    where they are published in none of these. marks: patterns of state-dict names, all of which its files have; () for
    a tokenizer or processor, which is a folder. layouts: other arrangements of its weights. prefixes: what its names
    may begin with, where a file holds several components or is made for another program. published: model id ->
    configuration, for files without `config.json`.
    configure: config.json's content -> the configuration units borrow as `<name>_config`.
    infer: the network's own names and their shapes -> config.json's content, or None where they do not tell it.
    load: (files, configuration, dtype) -> the component.
    build: configuration -> the network, its weights random; by default as that does which `load` is a method of.
    lora: how LoRA files name its layers, where `lora_names.namings` has no default for a program, or another.
    """

    name: str
    folders: tuple[str, ...]
    load: Callable[[Files, Any, torch.dtype], Any]
    marks: tuple[str, ...] = ()
    configure: Callable[[Mapping[str, Any]], Any] = dict
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    infer: Callable[[Shapes], Mapping[str, Any] | None] | None = None
    layouts: tuple[Layout, ...] = ()
    prefixes: tuple[str, ...] = ()
    lora: tuple[LoraNaming, ...] = ()
    originals: tuple[str, ...] = ()
    build: Callable[[Any], Any] | None = None

    @property
    def builder(self) -> Callable[[Any], Any] | None:
        """How its network is built without files, for programs that need its shapes alone; None if nothing tells."""
        return self.build or getattr(getattr(self.load, "__self__", None), "build", None)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of small files (tokenizer, processor) and has no weights."""
        return not self.marks

    def lies_in(self, place: Path) -> bool:
        """Whether a folder is one of its folders in published layouts, whatever it lies in."""
        return any(place.parts[-len(Path(folder).parts) :] == Path(folder).parts for folder in self.folders)

    def is_published_as(self, pattern: str) -> bool:
        """Whether a pattern of a model id's files begins with one of its folders, or is for its original names."""
        inside = any(pattern.startswith(f"{folder}/") for folder in self.folders)
        return inside or any(fnmatchcase(pattern, name) for name in self.originals)

    def takes(self, content: Mapping[str, Any]) -> bool:
        """Whether this content of a config.json can be its configuration: where `configure` is a network's, that says.

        Files of several components may lie in one folder, with the config.json of one of them.
        """
        says = getattr(getattr(self.configure, "__self__", None), "takes", None)
        return says is None or bool(says(content))

    def arrangement(self, names: list[str]) -> Arrangement | None:
        """How this component's weights are named among the names in a file; None if they are not there."""
        if self.is_folder:
            return None
        arrangements = (*((layout, layout.marks) for layout in self.layouts), (None, self.marks))
        for prefix in (*self.prefixes, ""):
            inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            for layout, marks in arrangements:
                if inside and all(names_like(inside, mark) for mark in marks):
                    return Arrangement(prefix, layout)
        return None

    def is_twin(self, other: "Component") -> bool:
        """Whether no name in files of weights tells the two apart, as with experts that are one network twice."""
        alike = (self.marks, self.layouts, self.prefixes) == (other.marks, other.layouts, other.prefixes)
        return alike and not self.is_folder
