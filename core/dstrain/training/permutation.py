"""Map positions to items by a bijection that a key chooses."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dstrain.randomness import digest

ROUNDS = 6
Indices = np.ndarray[Any, np.dtype[np.uint64]]


def permute(positions: Indices, size: int, key: Sequence[int]) -> Indices:
    """Map positions to items by a bijection of 0 .. size-1 that the key chooses.

    It is a balanced Feistel network (Luby and Rackoff 1988; four rounds suffice, six
    are used) with cycle walking (Black and Rogaway 2002).
    """
    # Halves of equal width, together just wide enough for size - 1.
    bits = max(size - 1, 1).bit_length()
    width = (bits + 1) // 2
    half = np.uint64(width)
    mask = np.uint64((1 << width) - 1)
    digests = [digest(key, "order", i) for i in range(ROUNDS)]
    round_keys = [np.uint64(int.from_bytes(one[:8], "little")) for one in digests]

    def encrypt(values: Indices) -> Indices:
        left = values >> half
        right = values & mask
        for round_key in round_keys:
            mixed = _mix(right ^ round_key) & mask
            left, right = right, left ^ mixed
        return (left << half) | right

    items = encrypt(positions)
    # The network permutes a power of two. An item outside is encrypted again until it
    # is inside, which keeps the whole a bijection.
    while (outside := items >= size).any():
        items[outside] = encrypt(items[outside])
    return items


def _mix(x: Indices) -> Indices:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
