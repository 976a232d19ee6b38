"""Parse --lora_rank and --lora_alpha: one number, or one for each pattern of layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from dstrain.config.named_numbers import (
    Number,
    parse_named_numbers,
    positive_float,
)
from dstrain.errors import UsageError

MOST_RANK = 2**15
"""More than a layer of any model has rows or columns: a higher rank adds nothing to it."""


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
    return _parse("--lora_alpha", value, positive_float)


def _parse(
    flag: str,
    value: float | str,
    parse: Callable[[str, str], Number],
) -> LayerNumbers[Number]:
    others, numbers = parse_named_numbers(flag, value, "PATTERN", parse)
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
