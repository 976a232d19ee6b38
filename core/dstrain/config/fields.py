"""Flags: a configuration's fields as what a user may write, what a value must be, and
the small languages of values.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dstrain.errors import UsageError, nearest


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and the factor its layers are scaled by."""

    path: Path
    scale: float = 1.0


class PublishedFiles(NamedTuple):
    """Files of a published model: its id, a pattern of their names, and a revision (''
    for the hub's usual one).
    """

    model_id: str
    pattern: str
    revision: str = ""


@dataclass(frozen=True)
class NamedInput:
    """An input of inference by its name, as text: a file's name where the input is a
    picture or a video.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Flag:
    """A flag as read off a configuration's field: `kind` is the type of its value,
    `many` whether it may be repeated.

    bare: the value it takes when none is written after it. least, above, most: bounds
    of a number.
    """

    name: str
    kind: type
    group: str
    help: str
    default: Any
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    bare: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None

    @property
    def spelled(self) -> str:
        """How a user writes it."""
        return f"--{self.name}"


def about(group: str, text: str, **bounds: Any) -> Mapping[str, Any]:
    """A field's metadata, which make it a flag: its group, its help text, and `bare`,
    `least`, `above`, `most`.
    """
    return MappingProxyType({"group": group, "help": text, **bounds})


def flags(config: type) -> tuple[Flag, ...]:
    """The flags of a configuration class, in the order of its fields."""
    hints = typing.get_type_hints(config)
    return tuple(
        _read(item, hints[item.name])
        for item in dataclasses.fields(config)
        if item.metadata
    )


def _read(item: "dataclasses.Field[Any]", hint: Any) -> Flag:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    many = typing.get_origin(hint) is tuple
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind = str if choices else typing.get_args(hint)[0] if many else hint
    required = item.default is dataclasses.MISSING
    default = None if required else item.default
    return Flag(
        item.name,
        kind,
        default=default,
        required=required,
        many=many,
        choices=choices,
        **item.metadata,
    )


def check_value(flag: Flag, value: Any) -> None:
    """Raise UsageError, naming the flag, for a value of another type, out of its bounds
    or not among its choices.
    """
    if value is None and not flag.required:
        return
    wanted = (int, float) if flag.kind is float else flag.kind
    for one in value if flag.many else (value,):
        if not isinstance(one, wanted) or (
            isinstance(one, bool) and flag.kind is not bool
        ):
            raise UsageError(flag.spelled, f"want {flag.kind.__name__}, got {one!r}")
    if flag.choices and value not in flag.choices:
        raise UsageError(
            flag.spelled,
            f"want one of {', '.join(flag.choices)}, got {value!r}{nearest(value, flag.choices)}",
        )
    if flag.kind is float and not math.isfinite(value):
        raise UsageError(flag.spelled, f"want a finite number, got {value}")
    if flag.above is not None and value <= flag.above:
        raise UsageError(flag.spelled, f"want more than {flag.above}, got {value}")
    if flag.least is not None and value < flag.least:
        raise UsageError(flag.spelled, f"want {flag.least} or more, got {value}")
    if flag.most is not None and value > flag.most:
        raise UsageError(flag.spelled, f"want {flag.most} or less, got {value}")


def split_commas(text: str | None) -> tuple[str, ...]:
    """Split 'to_q, to_k' into its names; None and '' name nothing."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def parse_model_paths(text: str | None) -> tuple[tuple[str, ...], ...]:
    """Read `--model_paths`: one tuple of files per entry of the JSON list. Raises
    UsageError for anything else.
    """
    try:
        entries = json.loads(text) if text is not None else []
    except json.JSONDecodeError as error:
        example = """a list of files is written '["a.safetensors", "b.safetensors"]'"""
        raise UsageError("--model_paths", f"is not JSON: {error}", example) from error
    groups = []
    for entry in entries if isinstance(entries, list) else [None]:
        group = [entry] if isinstance(entry, str) else entry
        if (
            not isinstance(group, list)
            or not group
            or not all(isinstance(path, str) and path for path in group)
        ):
            raise UsageError(
                "--model_paths",
                f"want a list of paths, or of lists of paths, got {text}",
            )
        groups.append(tuple(group))
    return tuple(groups)


def parse_origins(text: str | None) -> tuple[PublishedFiles, ...]:
    """Read `--model_id_with_origin_paths`: ID:PATTERN or ID@REVISION:PATTERN, ...; an
    id has one revision in all parts.

    Raises UsageError for another part, and for two revisions of an id.
    """
    flag, found, revisions = "--model_id_with_origin_paths", [], dict[str, str]()
    for part in split_commas(text):
        name, _, pattern = part.partition(":")
        model_id, at, revision = name.partition("@")
        if not model_id or not pattern or (at and not revision):
            raise UsageError(
                flag, f"want ID:PATTERN or ID@REVISION:PATTERN, got {part!r}"
            )
        if revision and revisions.setdefault(model_id, revision) != revision:
            both = f"{revisions[model_id]} and {revision}"
            raise UsageError(
                flag,
                f"{model_id} is given at two revisions, {both}; its folder holds one",
            )
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise UsageError(
                flag,
                f"{pattern!r} leads out of the model's folder; want a pattern of its files",
            )
        found.append((model_id, pattern))
    return tuple(
        PublishedFiles(model_id, pattern, revisions.get(model_id, ""))
        for model_id, pattern in found
    )


def parse_lora(text: str) -> LoraFile:
    """Read FILE or FILE:SCALE; what follows the last colon is a scale only if it is a
    finite number.
    """
    path, _, tail = text.rpartition(":")
    try:
        scale = float(tail)
    except ValueError:
        return LoraFile(Path(text))
    return (
        LoraFile(Path(path), scale)
        if path and math.isfinite(scale)
        else LoraFile(Path(text))
    )


def parse_input(text: str) -> NamedInput:
    """Read NAME=VALUE; raises UsageError without a name."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise UsageError("--input", f"want NAME=VALUE, got {text!r}")
    return NamedInput(name.strip().replace("-", "_"), value)


def parse_alpha(text: str) -> float | Literal["rank"]:
    """Read the alpha of a LoRA: a number above 0, or 'rank'; raises UsageError for
    anything else.
    """
    if text == "rank":
        return "rank"
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError("--alpha", f"want a number above 0, or rank, got {text!r}")
    return alpha
