"""Parse --lora_rank and --lora_alpha: one number, or one for each pattern of layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dstrain.config.fields import split_commas
from dstrain.errors import UsageError

MOST_RANK = 2**15
"""More than a layer of any model has rows or columns: a higher rank adds nothing to it."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LayerNumbers(Generic[Number]):
    """A number for every layer."""

    others: Number | None
    """That of the layers that no pattern matches; None if it is not given."""
    by_pattern: tuple[tuple[str, Number], ...] = ()
    """Patterns of layer names with their numbers, as they are given."""


def parse_ranks(value: int | str) -> LayerNumbers[int]:
    """Parse `16`, `attn=32,ff=8` or `16,ff=8`; raises UsageError for anything else."""
    return _parse("--lora_rank", value, _rank)


def parse_alphas(value: float | str | None) -> LayerNumbers[float]:
    """Parse `16`, `attn=32,ff=8` or `16,ff=8`; raises UsageError for anything else, but
    None, which gives no layer a number.
    """
    if value is None:
        return LayerNumbers(None)
    return _parse("--lora_alpha", value, _alpha)


def _parse(
    flag: str,
    value: float | str,
    parse: Callable[[str, str], Number],
) -> LayerNumbers[Number]:
    others = None
    numbers: dict[str, Number] = {}
    for position, part in enumerate(split_commas(str(value))):
        pattern, equals, number = part.rpartition("=")
        pattern = pattern.strip()
        if not equals and position:
            what = f"expected PATTERN=NUMBER after the first number, got {part!r}"
            raise UsageError(flag, what)
        if equals and not pattern:
            raise UsageError(flag, f"expected PATTERN=NUMBER, got {part!r}")
        if pattern in numbers:
            raise UsageError(flag, f"{pattern} is given twice")
        if pattern:
            numbers[pattern] = parse(flag, number)
        else:
            others = parse(flag, number)
    if others is None and not numbers:
        raise UsageError(flag, "is empty")
    return LayerNumbers(others, tuple(numbers.items()))


def _rank(flag: str, text: str) -> int:
    try:
        rank = int(text)
    except ValueError:
        raise UsageError(flag, f"{text.strip()!r} is not a valid integer") from None
    if rank < 1:
        raise UsageError(flag, f"expected 1 or more, got {rank}")
    if rank > MOST_RANK:
        what = f"expected {MOST_RANK:,} or less, got {rank}"
        raise UsageError(flag, what, "usual ranks are 4 to 128")
    return rank


def _alpha(flag: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        raise UsageError(flag, f"{text.strip()!r} is not a valid float") from None
    if not math.isfinite(alpha):
        raise UsageError(flag, f"expected a finite number, got {alpha}")
    if alpha <= 0:
        raise UsageError(flag, f"expected more than 0, got {alpha}")
    return alpha
