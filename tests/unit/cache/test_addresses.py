"""Addresses are found in columns, each whole and all at once."""

import numpy as np
import pytest
from dstrain.cache import ADDRESS, as_text, find, packed, prefixes

FIRST = "00" * 7 + "01" + "00" * 12
ALIKE = [FIRST, FIRST[:-2] + "01", FIRST[:-2] + "ff"]
"""Addresses that differ in their last byte alone."""


def test_every_address_is_found_and_no_other() -> None:
    bits = np.random.default_rng(0).integers(0, 256, (1000, 20), np.uint8)
    known = np.sort(np.array(sorted(bytes(row) for row in bits), "S20")).astype(ADDRESS)
    order = np.random.default_rng(1).permutation(1000)
    assert (find(known[order], known, prefixes(known)) == order).all()
    absent = packed(["ff" * 20, "00" * 20, *ALIKE])
    assert (find(absent, known, prefixes(known)) == -1).all()
    assert find(known, known[:0], prefixes(known[:0])).tolist() == [-1] * 1000


def test_addresses_that_begin_alike_are_told_apart_and_text_is_kept() -> None:
    known = packed([ALIKE[0], ALIKE[2], "ff" * 20])
    wanted = packed([ALIKE[2], ALIKE[1], ALIKE[0], "ff" * 20])
    assert find(wanted, known, prefixes(known)).tolist() == [1, -1, 0, 2]
    assert [as_text(one) for one in packed(ALIKE)] == ALIKE
    for wrong in ("00", "x" * 40):
        with pytest.raises(ValueError):
            packed([wrong])
