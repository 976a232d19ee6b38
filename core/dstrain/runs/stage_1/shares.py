"""Divide the work of stage 1 among processes, by what is computed."""

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dstrain.cache import ADDRESS, FeatureCache
from dstrain.runs.stage_1.keyed_samples import (
    AddressedSamples,
    MissingWork,
    Work,
    missing_work,
)
from dstrain.storage import Chosen, check_writable

VISIBLE = 120.0
"""Seconds after which every machine sees a file that another one has written: network
file systems remember what is in a folder for a minute."""


def share_of(work: Sequence[Work], rank: int, size: int) -> Sequence[Work]:
    """Return the part of the work that one of `size` processes does, in its order.

    Who computes a value depends on its address, not on its position: processes with the
    same work agree, in whatever order each has it. Work that runs the same units is
    dealt evenly, for it takes about the same time.
    """
    if size == 1:
        return work
    kinds: dict[tuple[str, ...], int] = {}
    numbers = array("q")
    addresses = bytearray()
    for one in work:
        units = tuple(step.unit.name for step in one.steps)
        numbers.append(kinds.setdefault(units, len(kinds)))
        # No two have a value in common, so the smallest address tells them apart.
        addresses += bytes.fromhex(
            min(one.sample.addresses[name] for name in one.values)
        )
    # Dealt in the order of addresses: a remainder of the address alone would leave one
    # process with half as much again as another where there are few samples.
    dealt = np.argsort(np.frombuffer(addresses, ADDRESS), kind="stable")
    order = {kind: place for place, kind in enumerate(sorted(kinds))}
    place_of = np.array([order[kind] for kind in kinds], np.int64)
    places = place_of[np.array(numbers, np.int64)]
    dealt = dealt[np.argsort(places[dealt], kind="stable")]
    return Chosen(work, np.sort(dealt[rank::size]))


def left_over(samples: AddressedSamples, folder: Path) -> MissingWork:
    """Return the work that is still to be done once every process has done its share.

    There is some only if they did not see the same files in the cache when it was
    divided.
    """
    end = time.monotonic() + VISIBLE
    while True:
        work = missing_work(samples, FeatureCache.open(folder))
        if not work or time.monotonic() > end:
            return work
        # A file that is written in a folder makes the system look into it again.
        check_writable(folder / "shards")
        time.sleep(1.0)
