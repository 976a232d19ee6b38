"""Addresses of cached values as columns: 20 bytes each, sorted, found all at once.

In Python an address is text of 40 hexadecimal digits.
"""

import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from dstrain.graph import POSITIVE, Plan
from dstrain.storage import hash_json
from dstrain.storage.hashing import hash_text, json_text

GAP = "?"
HASH = re.compile(r"[0-9a-f]{40}")
"""Addresses; names of shards and plans, without what follows the dot, have this form, too."""


class PlanKeys:
    """Finds the keys of the values of many rows that have one plan: of what is hashed,
    only the keys of inputs differ.
    """

    def __init__(self, plan: Plan, components: Mapping[str, str], dtype: str) -> None:
        """Write down what is hashed of each step, with gaps for the keys of its inputs."""
        self._steps: list[tuple[list[str], dict[str, str]]] = []
        for step in plan.cached_steps:
            # A hash in the place of each key: nothing else in the text is equal to it.
            gaps = {hash_json("gap", name): name for name in step.inputs.values()}
            keys = {name: gap for gap, name in gaps.items()}
            used = {own: keys[name] for own, name in step.inputs.items()}
            unit = step.unit
            digests = {
                name: components[name] for name in unit.components if name in components
            }
            # Only a unit that uses the branch computes something else for another one.
            branch = ""
            if "branch" in unit.components:
                branch = step.branch or POSITIVE
            content = [plan.spec.family, unit.identity, used, digests, dtype, branch]
            text = json_text("unit", content)
            parts = re.split(f"({'|'.join(gaps)})", text) if gaps else [text]
            parts[1::2] = [gaps[gap] for gap in parts[1::2]]
            ends = {
                value: json_text("output", [GAP, name]).partition(GAP)[2]
                for name, value in step.outputs.items()
            }
            self._steps.append((parts, ends))

    def of(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return the key of every value of stage 1, inputs included.

        The key of a value is its address in the feature cache, 40 hexadecimal digits.
        """
        keys = dict(inputs)
        for parts, ends in self._steps:
            text = parts.copy()
            text[1::2] = [keys[name] for name in parts[1::2]]
            key = hash_text("".join(text))
            for value, end in ends.items():
                keys[value] = hash_text(f'["output",["{key}{end}')
        return keys


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
