"""Every damaged byte is named before use, and what one process verified none reads again."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, SystemFault
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.backend.index import create_cache
from dstrain.cache.backend.shards import read_shard
from torch import multiprocessing

from tests.support.caching_project import address
from tests.support.unreadable import make_unreadable

COUNT = 6


def filled(folder: Path, count: int) -> FeatureCache:
    """A cache of numbers, each in a shard of its own."""
    create_cache(folder)
    writer = ShardWriter(FeatureCache.open(folder), {}, max_bytes=1)
    for number in range(count):
        writer.add(address(str(number)), torch.full((8,), number))
    return FeatureCache.open(folder)


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return filled(tmp_path, COUNT)


def read(cache: FeatureCache, number: int) -> int:
    return int(cache.read(address(str(number)))[0])


def read_all(cache: FeatureCache) -> None:
    assert [read(cache, number) for number in range(len(cache))] == [*range(len(cache))]


def path_of(cache: FeatureCache, number: int) -> Path:
    for path in (cache.folder / "shards").iterdir():
        if bytes.fromhex(address(str(number))) == bytes(read_shard(path).rows[0][0]):
            return path
    raise AssertionError(number)


def overwrite(path: Path, place: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    end = place % len(content) + len(data)
    content[end - len(data) : end] = data
    path.write_bytes(content)


def damaged(cache: FeatureCache, number: int, path: Path) -> None:
    with pytest.raises(StateError) as caught:
        read(cache, number)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_one_process_verified_no_other_verifies_again(
    cache: FeatureCache, start: str
) -> None:
    child = multiprocessing.get_context(start).Process(target=read_all, args=(cache,))
    child.start()
    child.join()
    assert child.exitcode == 0
    path = path_of(cache, 3)
    overwrite(path, -64, (7).to_bytes(8, "little"))
    assert read(cache, 3) == 7
    # Another run does.
    damaged(FeatureCache.open(cache.folder), 3, path)


def test_a_header_is_verified_once_of_however_many_shards_and_no_file_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(tmp_path, 300)
    cache.write_index()
    cache = FeatureCache.open(tmp_path)
    read_all(cache)
    path = path_of(cache, 0)
    overwrite(path, 9, b"x")
    read_all(cache)
    damaged(FeatureCache.open(tmp_path), 0, path)
    # One that cannot be opened any more is not called damaged.
    make_unreadable(monkeypatch, path, errno.EMFILE)
    with pytest.raises(SystemFault) as caught:
        read(cache, 0)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_shard_that_cannot_be_read_is_not_called_damaged(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = path_of(cache, 3)
    make_unreadable(monkeypatch, path, number)
    for use in (read_shard, lambda _: read(cache, 3)):
        with pytest.raises(SystemFault) as caught:
            use(path)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("owner", "name", "kind"),
    [(torch, "from_file", SystemFault), (torch.Tensor, "clone", MemoryError)],
)
def test_no_memory_to_map_a_shard_or_to_copy_a_value_is_no_damage(
    owner: Any,
    name: str,
    kind: type[BaseException],
    cache: FeatureCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot allocate memory (12)\nframe")

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(kind, match=r"\(12\)$"):
        read(cache, 3)
