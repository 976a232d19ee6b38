"""Checkpoint formats map the keys of published files to those of a network."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Config = Mapping[str, Any]
"""The content of a config.json."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Key -> the shape of its tensor."""


class TensorSlice(NamedTuple):
    """Rows, along the first axis, of a tensor in a file; by default all of them."""

    name: str
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    """Whether the file has the matrix transposed."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows; a tensor without axes is always whole."""
        rows = tensor.T if self.transposed else tensor
        return rows[self.start : self.stop] if tensor.ndim else tensor


class KeyMap(NamedTuple):
    """One line of a checkpoint format: the file's name for a module or weight.

    Each `*` stands for a number, the same ones in the same order on both sides. What
    follows the name (`.weight`) is kept. Several lines with the same `ours` are parts
    to be joined.
    """

    ours: str
    """The name in the network."""
    theirs: str
    """The name in the file."""
    start: int = 0
    """The first of the file's rows, in equal parts of them: (1, 2, 3) is the key of a
    fused query, key and value."""
    stop: int = 1
    """The part after the last one."""
    parts: int = 1
    """The number of equal parts."""
    transposed: bool = False
    """Whether the file has the matrix transposed: for a line of one whole matrix alone."""

    def slice_of(self, name: str, shape: Shape) -> TensorSlice:
        """Return the rows of a tensor in the file that this line is about."""
        if self.parts == 1:
            return TensorSlice(name, transposed=self.transposed)
        rows = shape[0]
        start = self.start * rows // self.parts
        stop = self.stop * rows // self.parts
        return TensorSlice(name, start, stop)


def same_config(config: Config, shapes: Shapes) -> Config:
    """Return config.json as it is, for formats published in the network's own terms."""
    return config


@dataclass(frozen=True)
class CheckpointFormat:
    """Other keys for a network's weights than its own, as in original checkpoints."""

    key_patterns: tuple[str, ...] = ()
    """Patterns of keys, all of which are in files of this format, and after '!' none.
    Without any, it is a format of LoRA files alone."""
    rows: tuple[KeyMap, ...] = ()
    """The table, for any width. Keys that no line maps are the network's own."""
    ignored: tuple[str, ...] = ()
    """Patterns of keys that the network has no use for."""
    configuration: Callable[[Config, Shapes], Config | None] | None = None
    """(config.json of its publisher, the network's shapes or {}) -> the configuration in the
    network's terms; None for another component's, of which it is without this function."""
    source: str = ""
    """Where the keys are from."""
    implies: tuple[tuple[str, Any], ...] = ()
    """Entries of the configuration of such files, which override others: a key may be a
    mark."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the keys that say nothing but what such files imply."""
        found = (name for name in self.key_patterns if name in self.ignored)
        return tuple(found) if self.implies else ()

    def convert(self, shapes: Shapes) -> dict[str, tuple[TensorSlice, ...]]:
        """Return the parts of each of the network's weights, to be joined along the
        first axis.

        Axes of length 1 may be more or fewer than the network's.
        """
        patterns = [_pattern(row.theirs) for row in self.rows]
        found: dict[str, dict[int, TensorSlice]] = {}
        for name, shape in shapes.items():
            hits = {}
            longest = 0
            for line, pattern in enumerate(patterns):
                hit = pattern.fullmatch(name)
                if hit is not None:
                    hits[line] = hit
                    longest = max(longest, len(self.rows[line].theirs))
            if not hits and not self.ignores(name):
                found[name] = {0: TensorSlice(name)}
            for line, hit in hits.items():
                row = self.rows[line]
                # A line for a module and one for a module inside it may both fit.
                if len(row.theirs) == longest:
                    parts = found.setdefault(_filled(row.ours, hit), {})
                    parts[line] = row.slice_of(name, shape)
        # Parts are joined in the order of the table, not of the file.
        return {
            ours: tuple(parts[line] for line in sorted(parts))
            for ours, parts in found.items()
        }

    def original(self, ours: str) -> str:
        """Return the key, in such a file, of one of the network's weights."""
        for row in sorted(self.rows, key=lambda row: -len(row.ours)):
            hit = _pattern(row.ours).fullmatch(ours)
            if hit is not None:
                return _filled(row.theirs, hit)
        return ours

    def ignores(self, name: str) -> bool:
        """Return whether the network has no use for a key in a file."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


NATIVE = CheckpointFormat()
"""The format of files that have a network's own keys."""


@dataclass(frozen=True)
class LoraKeyFormat:
    """The keys of a component's layers in the LoRA files of one program."""

    program: str
    """The program as `dstrain export --format` names it."""
    prefixes: tuple[str, ...] = ()
    """What keys may begin with, '' for nothing; the first is written. Without any,
    those of the program's default."""
    checkpoint_format: CheckpointFormat = NATIVE
    """The format whose keys follow."""
    underscored: bool = False
    """Whether '_' stands for '.' in them."""
    also_reads: tuple[str, ...] = ()
    """Other programs whose keys this one reads, too."""
    read_only: bool = False
    """Whether such files are read, and none is written."""
    is_loaded: bool = True
    """Whether the program's own loaders use such layers; False where only its names are
    known, as of text encoders whose LoRA diffusers' pipelines leave out."""


def read_key_maps(
    path: Path, configurations: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return, by component, arguments of `Component` that are in a JSON file.

    Args:
        path: The file: component -> `key_patterns`, `prefixes`, `formats` and `lora`,
            with the fields of `CheckpointFormat`, `KeyMap` and `LoraKeyFormat`. Formats
            have names, by which LoRA formats refer to them as `format`.
        configurations: Functions that a format may name as its `configuration`, beside
            "same" for `same_config`.
    """
    known: dict[Any, Any] = {None: None, "same": same_config, **(configurations or {})}
    components: dict[str, dict[str, Any]] = as_tuples(json.loads(path.read_bytes()))
    for content in components.values():
        formats = {None: NATIVE}
        for name, fields in content.get("formats", {}).items():
            fields["rows"] = tuple(KeyMap(*row) for row in fields.get("rows", ()))
            fields["configuration"] = known[fields.get("configuration")]
            formats[name] = CheckpointFormat(**fields)
        # One without patterns is a format of LoRA files alone.
        content["formats"] = tuple(one for one in formats.values() if one.key_patterns)
        lora = []
        for fields in content.get("lora", ()):
            checkpoint_format = formats[fields.pop("format", None)]
            lora.append(LoraKeyFormat(checkpoint_format=checkpoint_format, **fields))
        content["lora"] = tuple(lora)
    return components


def as_tuples(value: Any) -> Any:
    """Return the content of a JSON file with tuples, which can be hashed, for lists."""
    if isinstance(value, dict):
        return {name: as_tuples(item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(map(as_tuples, value))
    return value


def _pattern(template: str) -> re.Pattern[str]:
    """Return a template's expression: a group for each number, and `rest` after it."""
    if not template:
        return re.compile(r"(?P<rest>.+)")
    name = re.escape(template).replace(r"\*", r"(\d+)")
    return re.compile(name + r"(?P<rest>|\..+)")


def _filled(template: str, hit: re.Match[str]) -> str:
    """Return the template with the numbers of the hit, and what follows it there."""
    *numbers, rest = hit.groups()
    for number in numbers:
        template = template.replace("*", number, 1)
    return ".".join(filter(None, [template, rest.removeprefix(".")]))


def checkpoint_shapes(
    checkpoint_format: CheckpointFormat, shapes: Shapes
) -> dict[str, Shape]:
    """Return the shapes in a file of this format from the network's own."""
    found: dict[str, Shape] = {}
    for ours, shape in shapes.items():
        name = checkpoint_format.original(ours)
        # The file may have several weights as one, with the rows of all.
        rows = sum(one[0] for one in (found.get(name), shape) if one)
        found[name] = (rows, *shape[1:]) if shape else ()
    for parts in checkpoint_format.convert(found).values():
        for part in parts:
            if part.transposed:
                found[part.name] = found[part.name][::-1]
    return found


def to_checkpoint(
    checkpoint_format: CheckpointFormat, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state dict as a file of this format has it: `from_checkpoint` undone."""
    shapes = checkpoint_shapes(checkpoint_format, shapes_of(state))
    file: dict[str, Tensor] = {}
    for ours, parts in checkpoint_format.convert(shapes).items():
        remaining = state[ours]
        for part in parts:
            if part.name not in file:
                file[part.name] = torch.zeros(shapes[part.name], dtype=remaining.dtype)
            target = part.of(file[part.name])
            if len(parts) == 1:
                target.copy_(remaining)
            else:
                target.copy_(remaining[: len(target)])
                remaining = remaining[len(target) :]
    return file | {name: torch.zeros(0) for name in checkpoint_format.marks}


def from_checkpoint(
    checkpoint_format: CheckpointFormat, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a network's state dict from the tensors of a file of this format."""
    own = checkpoint_format.convert(shapes_of(weights))
    return {
        ours: join([part.of(weights[part.name]) for part in parts])
        for ours, parts in own.items()
    }


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def fits(have: Shape, want: Shape) -> bool:
    """Return whether shapes are equal but for axes of length 1, of which another format
    may have more or fewer.
    """
    return [n for n in have if n != 1] == [n for n in want if n != 1]


def join(parts: list[Tensor]) -> Tensor:
    """Join the parts of a weight along the first axis; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
