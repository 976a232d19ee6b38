"""The index is derived: whatever happens to it, values are those of the shards."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.backend.index import create_cache, own_files
from dstrain.cache.in_use import reading

from tests.support.caching_project import address

COUNT = 12


def fill(folder: Path, first: int, last: int) -> FeatureCache:
    """Add numbers to a cache, a shard for each three."""
    create_cache(folder)
    cache = FeatureCache.open(folder)
    writer = ShardWriter(cache, {}, max_bytes=24)
    for number in range(first, last):
        writer.add(address(str(number)), torch.tensor(number))
    writer.flush()
    return cache


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    fill(tmp_path, 0, COUNT).write_index()
    return tmp_path


def index_file(folder: Path) -> Path:
    (path,) = (folder / "index").iterdir()
    return path


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "changed": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "under another name": lambda path: path.rename(path.with_stem("0" * 32)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_that_is_damaged_is_made_again(filled: Path, damage: str) -> None:
    path = index_file(filled)
    content = path.read_bytes()
    DAMAGE[damage](path)
    cache = FeatureCache.open(filled)
    for number in range(COUNT):
        assert int(cache.read(address(str(number)))) == number
    cache.write_index()
    assert index_file(filled) == path
    assert path.read_bytes() == content


def test_shards_that_were_added_since_are_seen(filled: Path) -> None:
    before = FeatureCache.open(filled)
    fill(filled, COUNT, COUNT + 3)
    assert address(str(COUNT)) not in before
    cache = FeatureCache.open(filled)
    assert len(cache) == COUNT + 3
    assert int(cache.read(address(str(COUNT)))) == COUNT


def test_a_value_that_is_there_twice_is_one_and_the_other_is_found_when_one_is_gone(
    filled: Path,
) -> None:
    second = fill(filled / "second", 0, 1)
    (path,) = (filled / "second/shards").iterdir()
    path.rename(filled / "shards" / path.name)
    FeatureCache.open(filled).write_index()
    cache = FeatureCache.open(filled)
    assert len(cache) == len(set(cache)) == COUNT
    for shard in set(cache.shards) - set(second.shards):
        (filled / f"shards/{shard}.safetensors").unlink()
    assert list(FeatureCache.open(filled)) == [address("0")]


def test_an_index_that_is_mapped_stays_until_nobody_reads(filled: Path) -> None:
    folder = filled / "index"
    before = index_file(filled)
    (folder / "notes.arrow").write_text("mine")
    added = fill(filled, COUNT, COUNT + 3)
    with reading(filled):
        added.write_index()
        assert len(own_files(filled)) == 2
        assert before in own_files(filled)
        # The one that covers all is used, and not written again.
        later = FeatureCache.open(filled)
        later.write_index()
        assert len(own_files(filled)) == 2
    later.write_index()
    assert len(own_files(filled)) == 1
    assert before not in own_files(filled)
    assert (folder / "notes.arrow").read_text() == "mine"
