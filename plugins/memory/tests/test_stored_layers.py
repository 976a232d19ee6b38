"""How a component is kept is said in words, and identified by what changes numbers."""

import re

import pytest
from dstrain.graph.keepers import Keepers
from dstrain_memory.block_swap import ALL_BLOCKS, last_blocks
from dstrain_memory.moving import Offload, Swap
from dstrain_memory.quantization.keeper import Quantize
from dstrain_memory.quantization.method import QuantizationMethod
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers

HALF = QuantizationMethod("half", lambda layer, weight: layer, lambda shape: shape[0])
QUARTER = QuantizationMethod("quarter", HALF.store, lambda shape: shape[0], version=2)


def stored(
    method: QuantizationMethod, only: str = "", excluded: str = ""
) -> StoredLayers:
    return StoredLayers(method, tuple(only.split()), tuple(excluded.split()))


def identity(*entries: StoredLayers) -> list[str]:
    return StoredComponent(entries).identity


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
    left = StoredComponent((stored(HALF),), unquantized=("b", "a"))
    assert left.identity == ["half", "not a,b"]


def test_they_are_described_in_words() -> None:
    quantized = StoredComponent((stored(HALF, "", "x y"), stored(QUARTER, "x y")))
    found = Keepers(
        (
            Quantize({"a": quantized}),
            Swap(("a",), "--blocks_to_swap", 16, True),
            Offload(("b",), ("b",)),
        )
    )
    words = r"half\b.* x, y\b.* quarter\b.* x, y\b.* 16 "
    assert re.match(words, found.describe("a"))
    described = found.described(["a", "b", "c"])
    assert list(described) == ["a", "b"] and described["b"]
    assert "1 block " in Swap(("a",), "", 1, True).describe("a")
    assert Swap(("a",), "", ALL_BLOCKS, True).describe("a").startswith("all ")


@pytest.mark.parametrize(
    ("count", "swapped"),
    [(0, []), (1, [2]), (3, [0, 1, 2]), (4, [0, 1, 2]), (ALL_BLOCKS, [0, 1, 2])],
)
def test_the_last_blocks_are_swapped(count: int, swapped: list[int]) -> None:
    assert last_blocks([0, 1, 2], count) == swapped
