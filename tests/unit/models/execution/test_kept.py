"""How a component is kept is said in words, and identified by what changes numbers."""

import re

import pytest
from dstrain.models.execution import (
    ALL_BLOCKS,
    Kept,
    StoredLayers,
    described,
    last_blocks,
)
from dstrain.plugin import QuantizationMethod

HALF = QuantizationMethod("half", lambda layer, weight: layer, lambda shape: shape[0])
QUARTER = QuantizationMethod("quarter", HALF.store, lambda shape: shape[0], version=2)


def stored(
    method: QuantizationMethod, only: str = "", excluded: str = ""
) -> StoredLayers:
    return StoredLayers(method, tuple(only.split()), tuple(excluded.split()))


def identity(*entries: StoredLayers) -> list[str]:
    return Kept(entries).identity


def test_entries_that_store_the_same_layers_have_the_same_identity() -> None:
    whole = identity(stored(HALF))
    assert whole == ["half"]
    assert identity(stored(HALF), stored(HALF, "to_q")) == whole
    assert identity(stored(HALF), stored(HALF, "to_q", "x")) == whole
    assert identity(stored(HALF, "", "to_q"), stored(HALF, "to_q")) == whole
    assert identity(stored(HALF, "b"), stored(HALF, "a b")) == ["half@a,b"]
    assert identity(stored(HALF, "", "b a")) == ["half/a,b"]
    one, other = stored(HALF, "", "x"), stored(QUARTER, "x")
    assert identity(one, other) == identity(other, one)


def test_what_stores_other_layers_or_other_numbers_has_another_identity() -> None:
    entries = (
        (),
        (stored(HALF),),
        (stored(QUARTER),),
        (stored(HALF, "", "x"),),
        (stored(HALF, "x"),),
        (stored(HALF, "", "x y"), stored(HALF, "x")),
        (stored(HALF, "", "x"), stored(QUARTER, "x")),
    )
    assert len({tuple(identity(*one)) for one in entries}) == len(entries)
    # A record that leaves other layers gives other numbers; a place gives none.
    assert Kept((stored(HALF),), unquantized=("b", "a")).identity == ["half", "not a,b"]
    assert Kept(unquantized=("a",), swapped_blocks=3, offloaded=True).identity == []


def test_it_is_described_in_words() -> None:
    kept = Kept((stored(HALF, "", "x y"), stored(QUARTER, "x y")), 16)
    offloaded = Kept(offloaded=True)
    words = r"half\b.* x, y\b.* quarter\b.* x, y\b.* 16 "
    assert re.match(words, kept.describe())
    found = described({"b": offloaded, "a": kept, "c": Kept()}, ["a", "b", "c", "d"])
    assert found == {"a": kept.describe(), "b": offloaded.describe()}
    assert list(found) == ["a", "b"] and found["b"]
    assert "1 block" in Kept(swapped_blocks=1).describe()
    both = Kept(swapped_blocks=ALL_BLOCKS, offloaded=True).describe()
    assert both.startswith("all ") and both.endswith(offloaded.describe())


@pytest.mark.parametrize(
    ("count", "swapped"),
    [(0, []), (1, [2]), (3, [0, 1, 2]), (4, [0, 1, 2]), (ALL_BLOCKS, [0, 1, 2])],
)
def test_the_last_blocks_are_swapped(count: int, swapped: list[int]) -> None:
    assert last_blocks([0, 1, 2], count) == swapped
