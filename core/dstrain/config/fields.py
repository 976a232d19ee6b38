"""Derive options from the fields of a configuration class, check their values, and parse
the small languages that some values are written in.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dstrain.console import shell_word
from dstrain.errors import UsageError, nearest
from dstrain.installed import how_to_have

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
timestep_sampler: acts through it, so refused for a loss that does not use it.
LoRA: the layers that are trained; refused where none are.
weights: names weights to start from, in addition to the model's.
start: one start of a run, so it is not written to config.json.
gpu: of a dry run, which is then planned for a GPU, wherever it is made.
origin: where other values are from: written to config.json alone, and not read from there.
"""


Alpha = float | Literal["rank"]
"""The alpha of a LoRA's layers: a number, or each layer's own rank."""
SKIP_MISSING = "skip_missing"
TRAINING_ONLY = "training_only"
LORA_OPTION = re.compile(
    rf"@(?:(?P<word>{SKIP_MISSING}|{TRAINING_ONLY})|alpha=(?P<alpha>rank|[0-9.eE+-]+))$"
)
"""What may stand at the end of a LoRA file: only these are no part of its name."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file, and how it is to be read: [COMPONENT=]FILE[:SCALE][@OPTION...]."""

    path: Path
    scale: float = 1.0
    """The factor of what its layers change."""
    component: str = ""
    """The component that it is for, where the command says so."""
    alpha: Alpha | None = None
    """The alpha of all its layers, if the file states none."""
    skip_missing: bool = False
    """Whether layers that the model lacks are left out."""
    training_only: bool = False
    """Whether inference leaves it out, during training and afterwards."""

    def __str__(self) -> str:
        component = f"{self.component}=" if self.component else ""
        return f"{component}{self.path}:{self.scale}{self._options}"

    @property
    def _options(self) -> str:
        alpha = "" if self.alpha is None else f"@alpha={self.alpha}"
        return alpha + (f"@{SKIP_MISSING}" if self.skip_missing else "")

    @property
    def changes(self) -> str:
        """Return what beside the file's content decides what it does; '' for nothing."""
        scale = "" if self.scale == 1 else f":{self.scale}"
        return scale + self._options

    @property
    def typed(self) -> str:
        """Return it as it is typed, without what it need not say."""
        component = f"{self.component}=" if self.component else ""
        mark = f"@{TRAINING_ONLY}" if self.training_only else ""
        return f"{component}{self.path}{self.changes}{mark}"

    def of(self, components: Collection[str]) -> "LoraFile":
        """Return it with the component that its path begins with (`dit2=FILE`): what
        stands before the first '=' is one only if it is the name of one.
        """
        head, _, rest = str(self.path).partition("=")
        if self.component or not rest or head not in components:
            return self
        return replace(self, path=Path(rest), component=head)


@dataclass(frozen=True)
class NamedInput:
    """An input of inference as text: the file name of an image or a video, else the
    value.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


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


def option(
    group: str,
    help: str,
    default: Any = None,
    **details: Any,
) -> Any:
    """Return a dataclass field that is an option with a default.

    details: Fields of `Flag`, such as `affects` and `minimum`.
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
    found = []
    for field in dataclasses.fields(config):
        if field.metadata:
            found.append(_read(field, hints[field.name]))
    return tuple(found)


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
    is_path = flag.is_open and "." in value
    if flag.choices and value not in flag.choices and not is_path:
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


def split_commas(text: str | None) -> tuple[str, ...]:
    """Split 'to_q, to_k' into its names; None and '' name nothing."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def parse_model_paths(text: str | None) -> tuple[tuple[str, ...], ...]:
    """Parse `--model_paths` into one tuple of files per entry of the JSON list.

    Raises UsageError for anything else.
    """
    flag = "--model_paths"
    try:
        entries = json.loads(text or "[]")
    except json.JSONDecodeError as error:
        if text and Path(text).is_dir():
            what = f"{text} is a folder, and files are expected"
            advice = f"for all files of a model: --model_id {shell_word(text)}"
            raise UsageError(flag, what, advice) from error
        example = """a list of files is written '["a.safetensors", "b.safetensors"]'"""
        raise UsageError(flag, f"is not JSON: {error}", example) from error
    groups = []
    for entry in entries if isinstance(entries, list) else [entries]:
        group = entry if isinstance(entry, list) else [entry]
        if not group or not all(isinstance(path, str) and path for path in group):
            what = f"expected a list of paths, or of lists of paths, got {text}"
            raise UsageError(flag, what)
        groups.append(tuple(group))
    return tuple(groups)


def parse_origins(text: str | None) -> tuple[tuple[str, str, str], ...]:
    """Parse `--model_id_with_origin_paths`: ID:PATTERN or ID@REVISION:PATTERN, ...

    Returns (id, pattern, revision) of each part, with '' for the hub's default revision.

    A revision that one part gives holds for all parts of its id. Raises UsageError for
    a malformed part, and for two revisions of an id.
    """
    flag = "--model_id_with_origin_paths"
    found: list[tuple[str, str]] = []
    revisions: dict[str, str] = {}
    for part in split_commas(text):
        match = re.fullmatch(r"([^:@]+)(?:@([^:]+))?:(.+)", part)
        if match is None:
            what = f"expected ID:PATTERN or ID@REVISION:PATTERN, got {part!r}"
            raise UsageError(flag, what)
        model_id, revision, pattern = match.groups(default="")
        known = revisions.setdefault(model_id, revision) if revision else ""
        if known != revision:
            what = f"{model_id} is given with two revisions, {known} and {revision}"
            raise UsageError(flag, f"{what}; give one of them")
        if pattern.startswith("/") or ".." in pattern.split("/"):
            what = f"{pattern!r} leads out of the model's folder"
            raise UsageError(flag, f"{what}; expected a pattern of its files")
        found.append((model_id, pattern))
    return tuple(
        (model_id, pattern, revisions.get(model_id, "")) for model_id, pattern in found
    )


def parse_lora(text: str) -> LoraFile:
    """Parse what `parse_preset` does; raises UsageError for @training_only, too."""
    file = parse_preset(text)
    if file.training_only:
        raise UsageError(f"@{TRAINING_ONLY}", f"is for --preset_lora_path: {text}")
    return file


def parse_preset(text: str) -> LoraFile:
    """Parse FILE[:SCALE][@alpha=ALPHA][@skip_missing][@training_only], in which a
    component may still stand before the file (`LoraFile.of`).

    What follows the last colon is a scale only if it is a finite number. Nothing before
    a file that begins with `./` is a component: `./dit=a` is the file `dit=a` here. Raises
    UsageError for an option that is given twice, or an alpha that is none.
    """
    options: dict[str, Any] = {}
    found = LORA_OPTION.search(text)
    while found is not None:
        name = found["word"] or "alpha"
        if name in options:
            raise UsageError(f"@{name}", f"is given twice: {text}")
        alpha = found["alpha"]
        options[name] = parse_alpha(alpha, "@alpha") if alpha else True
        text = text[: found.start()]
        found = LORA_OPTION.search(text)
    path, _, tail = text.rpartition(":")
    try:
        scale = float(tail)
    except ValueError:
        scale = math.nan
    if not path or not math.isfinite(scale):
        path, scale = text, 1.0
    file = Path(path)
    if path.startswith("./") and any("=" in one for one in file.parts[:1]):
        file = file.absolute()  # as a relative path, it would lose the './'
    return LoraFile(file, scale, **options)


def parse_input(text: str) -> NamedInput:
    """Parse NAME=VALUE; raises UsageError without a name."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise UsageError("--input", f"expected NAME=VALUE, got {text!r}")
    return NamedInput(name.strip().replace("-", "_"), value)


def parse_alpha(text: str, flag: str = "--alpha") -> Alpha:
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
        raise UsageError(flag, f"expected a number above 0, or rank, got {text!r}")
    return alpha
