"""The index is derived: whatever happens to it, values are those of the shards."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from dstrain.cache import (
    ADDRESS,
    FeatureCache,
    ShardWriter,
    own_files,
    packed,
    prefixes,
)
from dstrain.cache.index import Index, merged, read_index, write_index
from dstrain.cache.shards import DIGEST
from dstrain.storage.columns import file_hash

from tests.support.caching_project import address

COUNT = 12


def fill(folder: Path, first: int, last: int) -> FeatureCache:
    """Add numbers to a cache, a shard for each three."""
    FeatureCache.create(folder)
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


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "changed": flipped,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_text("notes"),
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
    assert len(cache.parts[0]) == COUNT  # only the new shard was opened


def test_values_of_shards_that_are_gone_are_not_listed(filled: Path) -> None:
    gone = FeatureCache.open(filled).shards[0]
    (filled / f"shards/{gone}.safetensors").unlink()
    cache = FeatureCache.open(filled)
    assert len(cache) == COUNT - 3
    assert gone not in cache.shards


def test_the_other_copy_of_a_value_is_found_when_one_is_gone(filled: Path) -> None:
    second = fill(filled / "second", 0, 1)
    (path,) = (filled / "second/shards").iterdir()
    path.rename(filled / "shards" / path.name)
    FeatureCache.open(filled).write_index()
    for shard in set(FeatureCache.open(filled).shards) - set(second.shards):
        (filled / f"shards/{shard}.safetensors").unlink()
    assert list(FeatureCache.open(filled)) == [address("0")]


def test_an_index_that_is_up_to_date_is_not_written(filled: Path) -> None:
    before = index_file(filled).stat().st_mtime_ns
    FeatureCache.open(filled).write_index()
    assert index_file(filled).stat().st_mtime_ns == before


def test_foreign_files_stay(filled: Path) -> None:
    (filled / "index/notes.arrow").write_text("mine")
    fill(filled, COUNT, COUNT + 1).write_index()
    assert (filled / "index/notes.arrow").read_text() == "mine"
    assert len(list((filled / "index").iterdir())) == 2


def test_the_index_of_many_values_is_mapped_memory(tmp_path: Path) -> None:
    count = 100_000
    bits = np.random.default_rng(0).integers(0, 256, (count, 20), np.uint8)
    many = Index(
        ("a",),
        pa.array(["{}"], pa.large_string()),
        bits.view(ADDRESS).reshape(-1),
        np.zeros(count, np.int32),
        np.arange(count),
        np.arange(count),
        np.zeros(count, np.int32),
        np.zeros(count, DIGEST),
    )
    order = np.argsort(prefixes(many.addresses))
    (tmp_path / "index").mkdir()
    write_index(tmp_path / "index", many.chosen(order))
    read = read_index(tmp_path / "index", {"a"})
    assert read is not None
    assert (read.offset == order).all()
    assert (read.addresses == many.addresses[order]).all()
    for column in (read.addresses, read.offset, read.length, read.digest):
        assert column.base is not None  # of the file, not a copy
    path = index_file(tmp_path)
    assert path.stem == file_hash(path)
    assert read_index(tmp_path / "index", {"b"}) is None


def test_values_that_are_there_twice_are_listed_once(filled: Path) -> None:
    cache = FeatureCache.open(filled)
    twice = merged([cache.parts[0], cache.parts[0]])
    assert (twice.addresses == cache.parts[0].addresses).all()
    wanted = packed([address("0"), address("none")])
    assert cache.locate(wanted).tolist()[1] == -1


def test_an_index_that_others_have_mapped_stays_until_nobody_reads(
    filled: Path,
) -> None:
    folder = filled / "index"
    before = index_file(filled)
    added = fill(filled, COUNT, COUNT + 3)
    added.write_index(is_read=True)
    assert before in folder.iterdir() and len(own_files(folder)) == 2
    later = FeatureCache.open(filled)
    # The one that covers all is used, and not written again.
    assert len(later.parts[0]) == len(added) and not len(later.parts[1])
    later.write_index(is_read=True)
    assert len(own_files(folder)) == 2
    later.write_index()
    assert before not in own_files(folder) and len(own_files(folder)) == 1
