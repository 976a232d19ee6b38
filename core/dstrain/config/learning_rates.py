"""Parse --learning_rate: one number, or one for each of the components."""

import math
from dataclasses import dataclass, field

from dstrain.config.fields import split_commas
from dstrain.errors import UsageError

FLAG = "--learning_rate"


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run."""

    others: float | None
    """That of what `by_name` does not name."""
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

    def times(self, factor: float) -> "LearningRates":
        """Return all of them multiplied."""
        others = None if self.others is None else self.others * factor
        rates = {name: rate * factor for name, rate in self.by_name.items()}
        return LearningRates(others, rates)


def parse_learning_rates(value: float | str | None, default: float) -> LearningRates:
    """Parse `1e-4`, `dit=1e-4,text_encoder=1e-5` or `1e-4,text_encoder=1e-5`.

    Raises UsageError for anything else, and for a name that is given twice.

    Args:
        value: The option's value.
        default: The learning rate where the option is not given.
    """
    if value is None:
        return LearningRates(default)
    others = None
    rates: dict[str, float] = {}
    parts = [value] if isinstance(value, float | int) else split_commas(value)
    for position, part in enumerate(parts):
        name, equals, number = str(part).rpartition("=")
        name = name.strip()
        if not equals and position:
            what = f"expected COMPONENT=NUMBER after the first number, got {part!r}"
            raise UsageError(FLAG, what)
        if equals and not name:
            raise UsageError(FLAG, f"expected COMPONENT=NUMBER, got {part!r}")
        if name in rates:
            raise UsageError(FLAG, f"{name} is given twice")
        if name:
            rates[name] = _number(number)
        else:
            others = _number(number)
    if others is None and not rates:
        raise UsageError(FLAG, "is empty")
    return LearningRates(others, rates)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise UsageError(FLAG, f"{text.strip()!r} is not a valid float") from None
    if not math.isfinite(number):
        raise UsageError(FLAG, f"expected a finite number, got {number}")
    if number <= 0:
        raise UsageError(FLAG, f"expected more than 0, got {number}")
    return number
