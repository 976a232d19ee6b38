"""Addresses of cached values as columns: 20 bytes each, sorted, found all at once.

In Python an address is text of 40 hexadecimal digits.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BYTES = 20
"""Bytes of an address."""
ADDRESS = np.dtype((np.void, BYTES))
"""An address in an array."""
Addresses = NDArray[np.void]
Numbers = NDArray[np.int64]
ABSENT = -1
"""The number of an address that is not there."""


def packed(addresses: Iterable[str]) -> Addresses:
    """Return addresses as an array; raises ValueError for what is not hexadecimal, or of
    another length.
    """
    parts = [bytes.fromhex(address) for address in addresses]
    if any(len(part) != BYTES for part in parts):
        raise ValueError(f"an address has {BYTES} bytes")
    return np.frombuffer(b"".join(parts), ADDRESS)


def as_text(address: np.void) -> str:
    """Return an address as text."""
    return address.tobytes().hex()


def prefixes(addresses: Addresses) -> NDArray[np.uint64]:
    """Return the first 8 bytes of each address as a number; numbers sort as addresses do."""
    rows = np.ascontiguousarray(addresses).view(np.uint8).reshape(-1, BYTES)
    first = np.ascontiguousarray(rows[:, :8]).view(">u8").reshape(-1)
    return first.astype(np.uint64)


def in_order(addresses: Addresses) -> Numbers:
    """Return where the addresses are, sorted, each once: the first of equal ones."""
    # As text, which numpy sorts; all have one length, so that the order is that of bytes.
    order = np.argsort(addresses.view(f"S{BYTES}"), kind="stable")
    ordered = addresses[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return order[is_first]


def find(
    wanted: Addresses, known: Addresses, known_prefixes: NDArray[np.uint64]
) -> Numbers:
    """Return where each wanted address is among known ones, ABSENT if it is not.

    Args:
        known: Sorted, each once.
        known_prefixes: Their `prefixes`, which are searched: numbers compare fast.
    """
    first = prefixes(wanted)
    place = np.searchsorted(known_prefixes, first)
    found = np.full(len(wanted), ABSENT, np.int64)
    # Addresses of one prefix follow each other; two of them are as good as never met.
    pending = np.arange(len(wanted))
    while len(pending):
        pending = pending[place[pending] < len(known)]
        pending = pending[known_prefixes[place[pending]] == first[pending]]
        equal = known[place[pending]] == wanted[pending]
        found[pending[equal]] = place[pending[equal]]
        pending = pending[~equal]
        place[pending] += 1
    return found
