"""Derive options from the fields of a configuration class, and check their values."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from dstrain.errors import UsageError, nearest
from dstrain.installed import HOOK_GROUP, how_to_have, installed

Group = Literal[
    "model",
    "data",
    "data: captions",
    "data: sizes",
    "data: video",
    "data: masks",
    "training",
    "training: optimizer",
    "training: loss",
    "training: validation",
    "generation",
    "LoRA",
    "memory",
    "output",
    "checkpoints",
    "general",
]
"""Where an option stands in --help, in this order; -h has one heading for all of a name
before the colon.
"""
Effect = Literal[
    "training",
    "resolved",
    "length",
    "recipe",
    "cache",
    "if_given",
    "dataset",
    "video",
    "captions",
    "mask",
    "timestep_sampler",
    "loss_options",
    "LoRA",
    "weights",
    "start",
    "gpu",
    "origin",
]
"""What an option affects; everything that treats options differently follows from it.

training: the numbers of a run, so a resumed run has the same value.
resolved: these numbers too, but other values may resolve to the same run.
length: how many steps a run has.
recipe: recorded in the header of a LoRA file, as those of training are.
cache: the cached values, so both stages have the same value.
if_given: nothing where it is at its default, so it is recorded only where it is not.
dataset: one dataset of a run, which may have a value of its own.
video: which frames of videos are used; refused where no videos are read.
captions: what is made of prompts; refused where no prompt is read.
mask: what of images the loss counts; no part of what identifies a run without masks.
timestep_sampler, loss_options: acts through it, so refused for a loss that does not use it.
LoRA: the layers that are trained; refused where none are.
weights: names weights to start from, in addition to the model's.
start: one start of a run, so it is not written to config.json.
gpu: of a dry run, which is then planned for a GPU, wherever it is made.
origin: where other values are from: written to config.json alone, and not read from there.
"""


@dataclass(frozen=True)
class Flag:
    """An option, as read off a field of a configuration class."""

    name: str
    kind: type
    """Type of a value; of one value, if the option may be repeated."""
    group: str
    """The heading of help under which it stands: one of `Group`, or a plugin's own."""
    help: str
    default: Any = None
    affects: Set[Effect] = frozenset()
    commands: tuple[str, ...] = ("train",)
    """The commands that have it, if it is a plugin's."""
    common: bool = False
    """True if -h shows it, too: one that most users need."""
    required: bool = False
    many: bool = False
    """True if it may be repeated."""
    several: bool = False
    """True if it takes several words after one flag, too."""
    by_name: bool = False
    """True if it may be NAME=VALUE,... in place of one value."""
    listed: bool = False
    """True if it may be VALUE,VALUE,... in place of one value."""
    choices: tuple[str, ...] = ()
    is_open: bool = False
    """True if a dotted path is a value, too, beside the choices."""
    hook: str = ""
    """The hook whose plugins offer values by name, too, beside the choices."""
    bare: str | None = None
    """Its value if it stands alone."""
    minimum: float | None = None
    above: float | None = None
    """A bound that is itself not allowed."""
    maximum: float | None = None
    below: float | None = None
    """An upper bound that is itself not allowed."""
    completes: Callable[[str], Iterable[tuple[str, str]]] | None = None
    """Yields values for what is typed of one, each with what it is; help calls it NAME."""
    most_of_toy: int = 0
    """A toy has at most this in place of a file's value; 0 for any."""
    converter: Callable[[Any], Any] | None = None
    """Makes of what a script gives what the option keeps."""

    @property
    def is_switch(self) -> bool:
        """Return whether it can also be turned off, as `--no_NAME`: neither is its default."""
        return self.kind is bool and self.default is None

    def is_several(self, text: str) -> bool:
        """Return whether a text stands for more than one value of this option."""
        return (self.by_name and "=" in text) or (self.listed and "," in text)


def option(group: str, help: str, default: Any = None, **details: Any) -> Any:
    """Return a dataclass field that is an option with a default; `details` are of
    `Flag`.
    """
    metadata = {"group": group, "help": help, **details}
    return dataclasses.field(default=default, metadata=metadata)


def own_flags(config: type) -> tuple[Flag, ...]:
    """Return the options that a class declares itself, in the order of its fields."""
    return _read_once(config)


# A run asks ten times, and type hints take a millisecond to read.
@cache
def _read_once(config: type) -> tuple[Flag, ...]:
    hints = typing.get_type_hints(config)
    own = [one for one in dataclasses.fields(config) if one.metadata]
    return tuple(_read(field, hints[field.name]) for field in own)


def _read(field: "dataclasses.Field[Any]", hint: Any) -> Flag:
    settings = dict(field.metadata)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        # The others of `X | None` and of `float | str | None`.
        is_text_too = str in typing.get_args(hint)[1:]
        settings["by_name"] = is_text_too and not settings.get("listed")
        hint = typing.get_args(hint)[0]
    kind = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if kind is Literal:
        kind = str
        settings["choices"] = arguments
    elif kind is tuple:
        kind = arguments[0]
        settings["many"] = True
    if field.default is dataclasses.MISSING:
        settings["required"] = True
    elif not settings.get("required"):  # else Python alone can do without
        settings["default"] = field.default
    return Flag(field.name, kind, **settings)


def check_value(flag: Flag, value: Any) -> None:
    """Raise UsageError for a value of another type, out of its bounds or not among its
    choices.
    """
    if value is None and not flag.required:
        return
    if isinstance(value, str) and flag.is_several(value):
        return  # by what parses it
    where = f"--{flag.name}"
    wanted = (int, float) if flag.kind is float else flag.kind
    for one in value if flag.many else (value,):
        # A bool is an int to Python, but not to users.
        is_bool = isinstance(one, bool) and flag.kind is not bool
        if is_bool or not isinstance(one, wanted):
            raise UsageError(where, f"expected {flag.kind.__name__}, got {one!r}")
    if flag.choices and value not in flag.choices and not _is_further(flag, value):
        hint = nearest(value, flag.choices)
        what = f"expected one of {', '.join(flag.choices)}, got {value!r}{hint}"
        advice = how_to_have(flag.name, value)
        raise UsageError(where, what, *filter(None, [advice]))
    if flag.kind is float and not math.isfinite(value):
        raise UsageError(where, f"expected a finite number, got {value}")
    if flag.above is not None and value <= flag.above:
        raise UsageError(where, f"expected more than {flag.above}, got {value}")
    if flag.below is not None and value >= flag.below:
        raise UsageError(where, f"expected less than {flag.below}, got {value}")
    if flag.minimum is not None and value < flag.minimum:
        raise UsageError(where, f"expected {flag.minimum} or more, got {value}")
    if flag.maximum is not None and value > flag.maximum:
        raise UsageError(where, f"expected {flag.maximum} or less, got {value}")


def _is_further(flag: Flag, value: str) -> bool:
    """Return whether a value beside the choices is a dotted path, or what a plugin offers."""
    if flag.is_open and "." in value:
        return True
    for plugin in installed(group=HOOK_GROUP) if flag.hook else ():
        with suppress(Exception, SystemExit):  # named where its hook is asked
            if value in [one.name for one in getattr(plugin.load(), flag.hook)()]:
                return True
    return False
