"""Parse options of several numbers: of sizes and frames, and of one number for all or one for
each name; write sizes of memory.
"""

from dataclasses import dataclass, field
from typing import Any

from dstrain.config.fields import Flag, check_value
from dstrain.config.value_syntax import split_commas
from dstrain.errors import UsageError

RANK = Flag("lora_rank", int, "LoRA", "", minimum=1, maximum=2**15)
"""More than a layer of any model has rows or columns: a higher rank adds nothing to it."""
ALPHA = Flag("lora_alpha", float, "LoRA", "", above=0)
LEARNING_RATE = Flag("learning_rate", float, "training: optimizer", "", above=0)


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run."""

    others: float | None
    """The number of what `by_name` does not name."""
    by_name: dict[str, float] = field(default_factory=dict)
    """Component, or dotted part of one -> its learning rate."""

    def __str__(self) -> str:
        named = [f"{name}={rate:g}" for name, rate in self.by_name.items()]
        first = [] if self.others is None else [f"{self.others:g}"]
        return ",".join([*first, *named])

    @property
    def plain(self) -> float | str:
        """Return a number where there is one for all, else the text."""
        if self.others is not None and not self.by_name:
            return self.others
        return str(self)

    @property
    def all(self) -> list[float]:
        """Return every learning rate."""
        others = [] if self.others is None else [self.others]
        return [*others, *self.by_name.values()]

    def of(self, name: str) -> float | None:
        """Return the learning rate of a component, a part of one or a parameter, by the
        longest name that fits; None if none does.
        """
        fitting = [one for one in self.by_name if f"{name}.".startswith(f"{one}.")]
        return self.by_name[max(fitting, key=len)] if fitting else self.others


def parse_learning_rates(value: float | str | None, default: float) -> LearningRates:
    """Parse `1e-4`, `dit=1e-4,text_encoder=1e-5` or `1e-4,text_encoder=1e-5`; None is
    the default.

    Raises UsageError for anything else, and for a name that is given twice.
    """
    if value is None:
        return LearningRates(default)
    return LearningRates(*_by_name(LEARNING_RATE, value, "COMPONENT"))


def parse_ranks(value: int | str) -> tuple[int | None, dict[str, int]]:
    """Parse `16`, `attn=32,ff=8` or `16,ff=8`: return the rank of layers that no
    pattern matches, or None, and those by pattern. Raises UsageError for anything else.
    """
    return _by_name(RANK, value, "PATTERN")


def parse_alphas(value: float | str | None) -> tuple[float | None, dict[str, float]]:
    """Parse alphas as `parse_ranks` does ranks; None gives no layer one."""
    return (None, {}) if value is None else _by_name(ALPHA, value, "PATTERN")


def _by_name(flag: Flag, value: float | str, kind: str) -> tuple[Any, dict[str, Any]]:
    """Return the number without a name, None if it is not given, and name -> number;
    `kind` is what the names are, in messages.
    """
    where = f"--{flag.name}"
    others = None
    numbers: dict[str, Any] = {}
    for position, part in enumerate(split_commas(str(value))):
        name, equals, text = part.rpartition("=")
        name = name.strip()
        if bool(equals) != bool(name) or (position and not equals):
            what = f"expected {kind}=NUMBER, got {part!r}"
            raise UsageError(where, what)
        if name in numbers:
            raise UsageError(where, f"{name} is given twice")
        try:
            number = flag.kind(text)
        except ValueError:
            what = f"{text.strip()!r} is not a valid {flag.kind.__name__}"
            raise UsageError(where, what) from None
        check_value(flag, number)
        if name:
            numbers[name] = number
        else:
            others = number
    if others is None and not numbers:
        raise UsageError(where, "is empty")
    return others, numbers


def as_size(size: float) -> str:
    """Write bytes for people: '38.06 GiB', '512.0 MiB', '3.1 KiB'."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20 / 10:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def parse_resolutions(text: str | None) -> tuple[int, ...]:
    """Return the sides in pixels that a value such as 512,768 names; () for None.
    Raises UsageError for what is none, and for one that is named twice.
    """
    if text is None:
        return ()
    return _several("--resolution", text, "pixels, such as 1024")


def parse_frames(value: int | str) -> tuple[int, ...]:
    """Return the numbers of frames that a value such as 81 or 17,33,49 names, the least
    first; raises UsageError as `parse_resolutions` does.
    """
    return tuple(sorted(_several("--num_frames", str(value), "frames, such as 81")))


def _several(flag: str, text: str, noun: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        name = word.strip()
        if not (name.isascii() and name.isdigit()) or int(name) < 1:
            what = f"expected a number of {noun}, or several, comma-separated, got {text!r}"
            raise UsageError(flag, what)
        if int(name) in found:
            raise UsageError(flag, f"{name} is named twice")
        found.append(int(name))
    return tuple(found)
