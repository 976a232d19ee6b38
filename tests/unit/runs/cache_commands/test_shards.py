"""A shard is replaced by one with some of its values, or removed."""

from pathlib import Path

import pytest
import torch
from dstrain import StateError
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.runs.cache_commands.shards import recorded_about, rewrite_shard

from tests.support.caching_project import address


def fill(folder: Path) -> Path:
    FeatureCache.create(folder)
    writer = ShardWriter(FeatureCache.open(folder), {"core": "1"})
    for number in range(3):
        writer.add(address(f"value.{number}"), torch.full((4,), float(number)))
    writer.flush()
    (path,) = (folder / "shards").iterdir()
    return path


def test_the_values_that_are_kept_are_those_that_were_there(tmp_path: Path) -> None:
    old = fill(tmp_path)
    rewrite_shard(tmp_path, old, [address("value.0"), address("value.2")])
    (new,) = (tmp_path / "shards").iterdir()
    assert new != old
    assert recorded_about(new) == {"core": "1"}
    cache = FeatureCache.open(tmp_path)
    assert set(cache) == {address("value.0"), address("value.2")}
    assert torch.equal(cache.read(address("value.2")), torch.full((4,), 2.0))


def test_without_values_to_keep_it_is_removed(tmp_path: Path) -> None:
    rewrite_shard(tmp_path, fill(tmp_path), [])
    assert not list((tmp_path / "shards").iterdir())


def test_with_all_of_its_values_it_stays(tmp_path: Path) -> None:
    path = fill(tmp_path)
    rewrite_shard(
        tmp_path, path, [address("value.0"), address("value.1"), address("value.2")]
    )
    assert list((tmp_path / "shards").iterdir()) == [path]


def test_nothing_is_removed_if_a_value_to_keep_is_damaged(tmp_path: Path) -> None:
    path = fill(tmp_path)
    content = bytearray(path.read_bytes())
    content[-48:] = bytes(48)  # of all three values
    path.write_bytes(content)
    with pytest.raises(StateError, match="is damaged"):
        rewrite_shard(tmp_path, path, [address("value.0"), address("value.2")])
    assert path.read_bytes() == content
