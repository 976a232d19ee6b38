"""Read options off the fields of a configuration class, check their values, and parse
the small languages that some values are written in.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from dstrain.errors import UsageError, nearest

Group = Literal[
    "model",
    "data",
    "training",
    "generation",
    "memory",
    "LoRA",
    "output",
    "checkpoints",
    "general",
]
"""Where an option stands in --help, in this order."""
Effect = Literal[
    "training",
    "resolved",
    "length",
    "recipe",
    "cache",
    "video",
    "timestep_sampler",
    "LoRA",
    "weights",
    "start",
]
"""What an option affects; everything that treats options differently follows from it.

training: the numbers of a run, so a resumed run has the same value.
resolved: these numbers too, but other values may resolve to the same run.
length: how many steps a run has.
recipe: recorded in the header of a LoRA file, as those of training are.
cache: the cached values, so both stages have the same value.
video: which frames of videos are used; refused where no videos are read.
timestep_sampler: acts through it, so refused for a loss that does not use it.
LoRA: the layers that are trained; refused where none are.
weights: names weights to start from, beside the model's.
start: one start of a run, so it is not written to config.json.
"""


class Details(TypedDict, total=False):
    """What an option says of itself beside its default and its help; see `Flag`."""

    affects: Set[Effect]
    bare: str
    minimum: float
    above: float
    maximum: float


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and the factor its layers are scaled by."""

    path: Path
    scale: float = 1.0


class PublishedFiles(NamedTuple):
    """Files of a published model: its id, a pattern of their names, and a revision (''
    for the hub's default).
    """

    model_id: str
    pattern: str
    revision: str = ""


@dataclass(frozen=True)
class NamedInput:
    """An input of inference as text: the file name of an image or a video, else the
    value.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Flag:
    """An option, as read off a field of a configuration class."""

    name: str
    kind: type
    """The type of a value; of one value, if the option may be repeated."""
    group: Group
    help: str
    default: Any
    affects: Set[Effect] = frozenset()
    required: bool = False
    many: bool = False
    """Whether it may be repeated."""
    choices: tuple[str, ...] = ()
    bare: str | None = None
    """The value it has when it is given without one."""
    minimum: float | None = None
    above: float | None = None
    """A bound that is itself not allowed."""
    maximum: float | None = None

    @property
    def spelled(self) -> str:
        """Return the option as users write it."""
        return f"--{self.name}"


def described(group: Group, help: str, **details: Unpack[Details]) -> Mapping[str, Any]:
    """Return the metadata that makes a dataclass field an option."""
    return {"group": group, "help": help, **details}


def option(group: Group, default: Any, help: str, **details: Unpack[Details]) -> Any:
    """Return a dataclass field that is an option with a default."""
    metadata = described(group, help, **details)
    return dataclasses.field(default=default, metadata=metadata)


def flags(config: type) -> tuple[Flag, ...]:
    """Return the options of a configuration class, in the order of its fields."""
    hints = typing.get_type_hints(config)
    return tuple(
        _read(field, hints[field.name])
        for field in dataclasses.fields(config)
        if field.metadata
    )


def _read(field: "dataclasses.Field[Any]", hint: Any) -> Flag:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    arguments = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    choices = arguments if typing.get_origin(hint) is Literal else ()
    kind: type = hint
    if choices:
        kind = str
    elif many:
        kind = arguments[0]
    required = field.default is dataclasses.MISSING
    return Flag(
        field.name,
        kind,
        default=None if required else field.default,
        required=required,
        many=many,
        choices=choices,
        **field.metadata,
    )


def changed(config: Any, effect: Effect) -> list[Flag]:
    """Return the options with this effect that are not at their default."""
    return [
        flag
        for flag in flags(type(config))
        if effect in flag.affects and getattr(config, flag.name) != flag.default
    ]


def check_value(flag: Flag, value: Any) -> None:
    """Raise UsageError for a value of another type, out of its bounds or not among its
    choices.
    """
    if value is None and not flag.required:
        return
    wanted = (int, float) if flag.kind is float else flag.kind
    for one in value if flag.many else (value,):
        # A bool is an int to Python, but not to users.
        is_bool = isinstance(one, bool) and flag.kind is not bool
        if is_bool or not isinstance(one, wanted):
            raise UsageError(flag.spelled, f"want {flag.kind.__name__}, got {one!r}")
    if flag.choices:
        check_choice(flag.spelled, value, flag.choices)
    if flag.kind is float and not math.isfinite(value):
        raise UsageError(flag.spelled, f"want a finite number, got {value}")
    if flag.above is not None and value <= flag.above:
        raise UsageError(flag.spelled, f"want more than {flag.above}, got {value}")
    if flag.minimum is not None and value < flag.minimum:
        raise UsageError(flag.spelled, f"want {flag.minimum} or more, got {value}")
    if flag.maximum is not None and value > flag.maximum:
        raise UsageError(flag.spelled, f"want {flag.maximum} or less, got {value}")


def check_choice(where: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError for a value that is not among the choices."""
    if value not in choices:
        hint = nearest(value, choices)
        what = f"want one of {', '.join(choices)}, got {value!r}{hint}"
        raise UsageError(where, what)


def split_commas(text: str | None) -> tuple[str, ...]:
    """Split 'to_q, to_k' into its names; None and '' name nothing."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def parse_model_paths(text: str | None) -> tuple[tuple[str, ...], ...]:
    """Parse `--model_paths` into one tuple of files per entry of the JSON list.

    Raises UsageError for anything else.
    """
    try:
        entries = json.loads(text) if text is not None else []
    except json.JSONDecodeError as error:
        example = """a list of files is written '["a.safetensors", "b.safetensors"]'"""
        raise UsageError("--model_paths", f"is not JSON: {error}", example) from error
    groups: list[tuple[str, ...]] = []
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
    """Parse `--model_id_with_origin_paths`: ID:PATTERN or ID@REVISION:PATTERN, ...

    A revision that one part gives holds for all parts of its id. Raises UsageError for
    a malformed part, and for two revisions of an id.
    """
    flag = "--model_id_with_origin_paths"
    found: list[tuple[str, str]] = []
    revisions: dict[str, str] = {}
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
    """Parse FILE or FILE:SCALE; what follows the last colon is a scale only if it is a
    finite number.
    """
    path, _, tail = text.rpartition(":")
    try:
        scale = float(tail)
    except ValueError:
        scale = math.nan
    if path and math.isfinite(scale):
        return LoraFile(Path(path), scale)
    return LoraFile(Path(text))


def parse_input(text: str) -> NamedInput:
    """Parse NAME=VALUE; raises UsageError without a name."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise UsageError("--input", f"want NAME=VALUE, got {text!r}")
    return NamedInput(name.strip().replace("-", "_"), value)


def parse_alpha(text: str) -> float | Literal["rank"]:
    """Parse the alpha of a LoRA: a number above 0, or 'rank'; raises UsageError for
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
