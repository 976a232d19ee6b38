"""Parse --learning_rate: one number, or one for each of the components."""

from dataclasses import dataclass, field

from dstrain.config.named_numbers import parse_named_numbers, positive_float

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
    return LearningRates(*parse_named_numbers(FLAG, value, "COMPONENT", positive_float))
