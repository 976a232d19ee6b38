"""Parse one number, or one for each of several names: `1`, `a=2,b=3` or `1,b=3`."""

import math
from collections.abc import Callable
from typing import TypeVar

from dstrain.config.fields import split_commas
from dstrain.errors import UsageError

Number = TypeVar("Number", int, float)


def parse_named_numbers(
    flag: str,
    value: float | str,
    kind: str,
    parse: Callable[[str, str], Number],
) -> tuple[Number | None, dict[str, Number]]:
    """Return the number without a name, None if it is not given, and name -> number.

    Raises UsageError for anything else, and for a name that is given twice.

    Args:
        flag: The option.
        value: Its value.
        kind: What the names are, in messages: 'PATTERN'.
        parse: Returns a number from the option and a text; raises UsageError.
    """
    others = None
    numbers: dict[str, Number] = {}
    for position, part in enumerate(split_commas(str(value))):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        if not equals and position:
            what = f"expected {kind}=NUMBER after the first number, got {part!r}"
            raise UsageError(flag, what)
        if equals and not name:
            raise UsageError(flag, f"expected {kind}=NUMBER, got {part!r}")
        if name in numbers:
            raise UsageError(flag, f"{name} is given twice")
        if name:
            numbers[name] = parse(flag, number)
        else:
            others = parse(flag, number)
    if others is None and not numbers:
        raise UsageError(flag, "is empty")
    return others, numbers


def positive_float(flag: str, text: str) -> float:
    """Return a finite number greater than 0; raises UsageError for anything else."""
    try:
        number = float(text)
    except ValueError:
        raise UsageError(flag, f"{text.strip()!r} is not a valid float") from None
    if not math.isfinite(number):
        raise UsageError(flag, f"expected a finite number, got {number}")
    if number <= 0:
        raise UsageError(flag, f"expected more than 0, got {number}")
    return number
