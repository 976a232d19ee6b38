"""Read sequences that are parts of others, or several of them, without a copy."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

Numbers = Sequence[int] | np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen(Sequence[Any]):
    """Some of the values of a sequence, made when they are used."""

    values: Sequence[Any]
    numbers: Numbers

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        """Return one of them, or those of a slice."""
        if isinstance(index, slice):
            return Chosen(self.values, self.numbers[index])
        return self.values[self.numbers[index]]


class Lazy(Sequence[T]):
    """A sequence whose values are made when they are used; its classes have a length."""

    def one(self, number: int) -> T:
        """Return a value by its number, from 0 on."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Return one of them, or those of a slice."""
        numbers = range(len(self))[index]
        return Chosen(self, numbers) if isinstance(index, slice) else self.one(numbers)


class Joined(Lazy[Any]):
    """Several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        """Join sequences that do not change any more."""
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        """Return how many values there are."""
        return self._ends[-1] if self._ends else 0

    def one(self, number: int) -> Any:
        """Return a value by its number, from 0 on."""
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order."""
        return chain.from_iterable(self._parts)
