"""Every damaged byte of a feature cache is named before use, and deleting the file
named repairs it.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.cache import stored_plans

from tests.support.caching_project import Place

pytestmark = pytest.mark.promise("R5", "damage of a feature cache is named before use")
FLIPS, PARTS = 7, 10
"""Bits flipped in each of so many parts of a region's trials: 560 in all."""
CUTS = (0, 1, 7, 8, 100, -100, -8, -1)
"""How many bytes are left of a file; below 0: how many are missing."""


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def size(path: Path) -> int:
    return path.stat().st_size


def columns(place: Place, which: str) -> Path:
    ((plan, record),) = stored_plans(place.cache)
    return plan.with_name(f"{record['columns'][which]}.arrow")


REGIONS: dict[str, Callable[[Place], tuple[Path, int, int]]] = {
    "length of the header": lambda place: (place.shards[0], 0, 8),
    "header": lambda place: (place.shards[0], 8, header_end(place.shards[0])),
    "data": lambda place: (
        *(place.shards[0], header_end(place.shards[0])),
        size(place.shards[0]),
    ),
    "record of a plan": lambda place: (place.plans[0], 0, size(place.plans[0]) - 1),
    "store.json": lambda place: (
        *(place.cache / "store.json", 0),
        size(place.cache / "store.json") - 1,
    ),
    **{
        which: lambda place, which=which: (
            *(columns(place, which), 0),
            size(columns(place, which)),
        )
        for which in ("samples", "files", "folders")
    },
}
"""Name -> file and range of bytes."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("region", REGIONS)
def test_every_flipped_bit_is_named_before_use(
    shared_place: Place, region: str, part: int, counted: Callable[[str, int], None]
) -> None:
    path, first, last = REGIONS[region](shared_place)
    whole = path.read_bytes()
    chance = random.Random(f"{region} {part}")
    accepted = []
    want = shared_place.values()
    counted("trials", FLIPS)
    for _ in range(FLIPS):
        place, bit = chance.randrange(first, last), chance.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            if (
                shared_place.values() != want
                or region != "store.json"
                or json.loads(damaged) != json.loads(whole)
            ):
                accepted.append(
                    (place, bit, bytes(damaged[max(0, place - 20) : place + 20]))
                )
        except StateError as error:
            assert str(shared_place.cache) in error.where
            assert path.name in error.where
        finally:
            path.write_bytes(whole)
    assert not accepted


def test_a_damaged_index_is_never_used(shared_place: Place) -> None:
    (path,) = (shared_place.cache / "index").iterdir()
    whole = path.read_bytes()
    want = shared_place.values()
    chance = random.Random("index")
    for _ in range(FLIPS):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert shared_place.values() == want
    shared_place.fill()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["shard", "plan", "columns"])
@pytest.mark.parametrize("kept", CUTS)
def test_a_file_cut_short_is_named(shared_place: Place, kept: int, kind: str) -> None:
    kinds = {
        "shard": shared_place.shards,
        "plan": shared_place.plans,
        "columns": shared_place.columns,
    }
    path = kinds[kind][0]
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    try:
        with pytest.raises(StateError, match=path.name):
            shared_place.values()
    finally:
        path.write_bytes(whole)


def test_deleting_a_damaged_file_as_advised_repairs_the_cache(
    shared_place: Place,
) -> None:
    want = shared_place.values()
    for path in (shared_place.shards[0], shared_place.plans[0], *shared_place.columns):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(StateError) as caught:
            shared_place.values()
        assert "delete it, then fill the cache again" in "".join(
            caught.value.help_lines
        )
        Path(caught.value.where).unlink()
        computed = shared_place.fill()
        assert computed == (
            runs_of_all_units() if path.suffix == ".safetensors" else {}
        )
        assert shared_place.values() == want


def runs_of_all_units() -> Counter[str]:
    return Counter({"encode_prompt": 3, "describe": 3, "encode_image": 4})
