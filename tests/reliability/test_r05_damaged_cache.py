"""Every damaged byte of a feature cache is named before use, and deleting the file
named repairs it.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.cache import stored_plans

from tests.support.caching_project import Place, filled_place

REGIONS = (
    "length of the header",
    "header",
    "data",
    "record of a plan",
    "samples of a plan",
    "source files of a plan",
    "frame folders of a plan",
    "store.json",
)
FLIPS, PARTS = 7, 10
"""Bits flipped in each of so many parts of a region's trials: 560 in all."""
CUTS = (0, 1, 7, 8, 100, -100, -8, -1)
"""How many bytes are left of a file; below 0: how many are missing."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with filled_place(tmp_path_factory.mktemp("filled")) as place:
        yield place


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def regions() -> dict[str, Callable[[Place], tuple[Path, int, int]]]:
    """Name -> file and range of bytes."""

    def shard(
        first: Callable[[Path], int], last: Callable[[Path], int]
    ) -> Callable[[Place], tuple[Path, int, int]]:
        return lambda place: (
            place.shards[0],
            first(place.shards[0]),
            last(place.shards[0]),
        )

    def columns(which: str) -> Callable[[Place], tuple[Path, int, int]]:
        def of(place: Place) -> tuple[Path, int, int]:
            ((plan, record),) = stored_plans(place.cache / "plans")
            path = plan.with_name(f"{record['columns'][which]}.arrow")
            return path, 0, size(path)

        return of

    def size(path: Path) -> int:
        return path.stat().st_size

    return {
        "length of the header": shard(lambda _: 0, lambda _: 8),
        "header": shard(lambda _: 8, header_end),
        "data": shard(header_end, size),
        "record of a plan": lambda place: (
            place.plans[0],
            0,
            size(place.plans[0]) - 1,
        ),
        "samples of a plan": columns("samples"),
        "source files of a plan": columns("files"),
        "frame folders of a plan": columns("folders"),
        "store.json": lambda place: (
            place.cache / "store.json",
            0,
            size(place.cache / "store.json") - 1,
        ),
    }


@pytest.mark.promise("R5", "damage of a feature cache is named before use")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("region", REGIONS)
def test_every_flipped_bit_is_named_before_use(
    filled: Place, region: str, part: int, counted: Callable[[str, int], None]
) -> None:
    path, first, last = regions()[region](filled)
    whole = path.read_bytes()
    chance = random.Random(f"{region} {part}")
    accepted = []
    want = filled.values()
    counted("trials", FLIPS)
    for _ in range(FLIPS):
        place, bit = chance.randrange(first, last), chance.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            if (
                filled.values() != want
                or region != "store.json"
                or json.loads(damaged) != json.loads(whole)
            ):
                accepted.append(
                    (place, bit, bytes(damaged[max(0, place - 20) : place + 20]))
                )
        except StateError as error:
            assert str(filled.cache) in error.where
            assert path.name in error.where
        finally:
            path.write_bytes(whole)
    assert not accepted


@pytest.mark.promise("R5", "damage of a feature cache is named before use")
def test_a_damaged_index_is_never_used(filled: Place) -> None:
    (path,) = (filled.cache / "index").iterdir()
    whole = path.read_bytes()
    want = filled.values()
    chance = random.Random("index")
    for _ in range(FLIPS):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert filled.values() == want
    filled.fill()
    assert path.read_bytes() == whole


@pytest.mark.promise("R5", "damage of a feature cache is named before use")
@pytest.mark.parametrize("kind", ["shard", "plan", "columns"])
@pytest.mark.parametrize("kept", CUTS)
def test_a_file_cut_short_is_named(filled: Place, kept: int, kind: str) -> None:
    kinds = {"shard": filled.shards, "plan": filled.plans, "columns": filled.columns}
    path = kinds[kind][0]
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    try:
        with pytest.raises(StateError, match=path.name):
            filled.values()
    finally:
        path.write_bytes(whole)


def test_deleting_a_damaged_file_as_advised_repairs_the_cache(filled: Place) -> None:
    want = filled.values()
    for path in (filled.shards[0], filled.plans[0], *filled.columns):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(StateError) as caught:
            filled.values()
        assert "delete it, then fill the cache again" in "".join(
            caught.value.help_lines
        )
        Path(caught.value.where).unlink()
        computed = filled.fill()
        assert computed == (
            runs_of_all_units() if path.suffix == ".safetensors" else {}
        )
        assert filled.values() == want


def runs_of_all_units() -> Counter[str]:
    return Counter({"encode_prompt": 3, "describe": 3, "encode_image": 4})
