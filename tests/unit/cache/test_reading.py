"""Shards are mapped once and verified once, by all processes that read together."""

import errno
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, SystemFault
from dstrain.cache import FeatureCache, ShardWriter, reading
from dstrain.cache.reading import copies
from dstrain.cache.shards import data_start
from torch.multiprocessing.spawn import spawn

from tests.support.caching_project import address
from tests.support.unreadable import make_unreadable


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    FeatureCache.create(tmp_path)
    writer = ShardWriter(FeatureCache.open(tmp_path), {}, max_bytes=1)
    for number in range(6):
        writer.add(address(str(number)), torch.full((8,), number))
    return FeatureCache.open(tmp_path)


def read_all(cache: FeatureCache) -> list[int]:
    return [int(cache.read(address(str(number)))[0]) for number in range(6)]


def test_a_header_is_verified_once_however_often_a_shard_is_mapped(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "OPEN_SHARDS", 2)
    opened: list[Path] = []

    def start(path: Path) -> int:
        opened.append(path)
        return data_start(path)

    monkeypatch.setattr(reading, "data_start", start)
    for _ in range(3):
        assert read_all(cache) == [*range(6)]
    assert len(opened) == len(set(opened)) == 6


def in_child(rank: int, cache: FeatureCache) -> None:
    assert read_all(cache) == [*range(6)]


def forked(cache: FeatureCache) -> None:
    process: Any = multiprocessing.get_context("fork").Process(
        target=in_child, args=(0, cache)
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def spawned(cache: FeatureCache) -> None:
    spawn(in_child, (cache,))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("start", [forked, spawned])
def test_what_one_process_verified_no_other_verifies_again(
    cache: FeatureCache,
    start: Callable[[FeatureCache], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(cache)

    def again(*_: Any) -> None:
        raise AssertionError("verified again")

    monkeypatch.setattr(FeatureCache, "_verify", again)
    assert read_all(cache) == [*range(6)]
    with pytest.raises(AssertionError):
        read_all(FeatureCache.open(cache.folder))  # another run does


def test_a_shard_that_is_cut_short_is_named(cache: FeatureCache) -> None:
    path = cache.folder / f"shards/{cache.shards[0]}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateError, match=f"{path.name}: is damaged: it was cut short"):
        read_all(cache)


def test_tensors_of_another_size_than_what_is_stored_are_refused() -> None:
    stored = torch.zeros(8, dtype=torch.uint8)
    assert copies(stored, [("", "float32", [2])])[""].tolist() == [0.0, 0.0]
    for entry in (("", "float32", [1]), ("", "float32", [3])):
        with pytest.raises((ValueError, RuntimeError)):
            copies(stored, [entry])


def test_a_shard_that_cannot_be_opened_any_more_is_not_called_damaged(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = FeatureCache.open(cache.folder)
    header_ends = {
        again._files.path(name): data_start(again._files.path(name))
        for name in again.shards
    }
    path = cache.folder / f"shards/{cache.shards[0]}.safetensors"
    # Its header was read before.
    monkeypatch.setattr(reading, "data_start", header_ends.__getitem__)
    make_unreadable(monkeypatch, path, errno.EMFILE)
    with pytest.raises(SystemFault, match="cannot be read: Too many open files"):
        read_all(again)


def test_a_shard_that_cannot_be_mapped_is_not_called_damaged(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)\nframe")

    monkeypatch.setattr(torch, "from_file", fails)
    with pytest.raises(SystemFault) as caught:
        read_all(cache)
    assert caught.value.what.endswith("Cannot allocate memory (12)")
    assert Path(caught.value.where).stem in cache.shards


def test_no_memory_for_a_copy_is_no_damage(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "clone", fails)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        read_all(cache)
