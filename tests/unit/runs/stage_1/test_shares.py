"""Work is divided among processes by what is computed: evenly, each value once."""

import random
from collections import Counter
from pathlib import Path

import pytest
from dstrain.cache import FeatureCache
from dstrain.cache.addresses import as_text
from dstrain.runs import data_process

from tests.support.caching_family import runs
from tests.support.caching_project import (
    Place,
    log_units,
    together,
    write_place,
    write_rows,
)

IMAGES, PROMPTS = 30, 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Images of which every third has a prompt of its own; one more was there before."""
    place = write_place(tmp_path_factory.mktemp("shares") / "place", rows=IMAGES + 1)
    for number, row in enumerate(place.rows):
        row["prompt"] = "shared" if number % 3 else f"prompt {number}"
    place.rows[0]["prompt"] = "shared"
    place.rows[-1]["prompt"] = "own"
    return place


def shares(place: Place, size: int, name: str) -> list[frozenset[str]]:
    """What each of so many processes adds to a cache."""
    cache = place.folder / name
    rows, place.rows = place.rows, place.rows[:1]
    write_rows(place.data, place.rows)
    place.fill(feature_cache=cache)
    before = set(FeatureCache.open(cache))
    place.rows = rows
    write_rows(place.data, rows)
    together(size, lambda one: data_process(place.setup(feature_cache=cache), one))
    filled = FeatureCache.open(cache)
    found: dict[int, set[str]] = {}
    for address, shard in zip(filled.index.addresses, filled.index.shard, strict=True):
        found.setdefault(int(shard), set()).add(as_text(address))
    return sorted((frozenset(one - before) for one in found.values()), key=sorted)[1:]


@pytest.mark.parametrize("size", [2, 5])
def test_each_value_is_computed_once_evenly_and_wherever_its_row_is(
    size: int, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_units(monkeypatch, tmp_path)
    first = shares(place, size, f"cache {size}")
    wanted = {"encode_prompt": PROMPTS, "describe": PROMPTS, "encode_image": IMAGES}
    assert runs() == Counter(wanted)
    # Two values of each image, and four of each prompt.
    values = [len(share) for share in first]
    assert len(values) == size and sum(values) == 2 * IMAGES + 4 * PROMPTS
    assert max(values) - min(values) <= 2 + 4
    before, *rows = place.rows
    place.rows = [before, *random.Random(0).sample(rows, len(rows))]
    assert shares(place, size, f"another order {size}") == first
