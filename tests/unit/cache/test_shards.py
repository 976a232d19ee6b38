"""A shard is a safetensors file that describes itself, with little beside the values."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, SystemFault, UsageError
from dstrain.cache import FeatureCache, ShardWriter, as_text, read_shard
from dstrain.cache.shards import StoredValue, data_start, write_shard
from dstrain.errors import CacheError
from safetensors import safe_open

from tests.support.caching_project import address, plain
from tests.support.unreadable import make_unreadable

VALUES: dict[str, Any] = {
    "mask": torch.tensor([True, False, True]),
    "odd": {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(1)},
    "odd too": [torch.zeros(1, dtype=torch.uint8), torch.arange(3)],
    "number": 7,
    "last": torch.arange(5.0),
}


def write(folder: Path, *names: str) -> Path:
    (folder / "shards").mkdir(parents=True)
    values = {address(n): StoredValue.of(VALUES[n], address(n)) for n in names}
    name = write_shard(folder / "shards", values, {"core": "1"}).name
    return folder / f"shards/{name}.safetensors"


def test_other_programs_read_it_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    path = write(tmp_path, *VALUES)
    shard = read_shard(path)
    number = [as_text(row["address"]) for row in shard.rows].index(address("odd"))
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor(f"{number}/a"), VALUES["odd"]["a"])
        assert torch.equal(file.get_tensor(f"{number}/b"), VALUES["odd"]["b"])
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, entry in header.items():
        if name != "__metadata__":
            alignment = {"F32": 4, "BF16": 2, "I64": 8}.get(entry["dtype"], 1)
            assert entry["data_offsets"][0] % alignment == 0, name
    assert shard.about == {"core": "1"}
    cache = FeatureCache.of_shards(tmp_path, [path])
    assert plain({name: cache.read(address(name)) for name in VALUES}) == plain(VALUES)


def test_the_order_in_which_values_came_does_not_count(tmp_path: Path) -> None:
    first = write(tmp_path / "a", *VALUES)
    second = write(tmp_path / "b", *reversed(VALUES))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_a_digest_is_of_the_bytes_and_what_they_mean() -> None:
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.ones(4),
        [torch.zeros(4)],
    ]
    digests = {StoredValue.of(value, address("x")).digest for value in values}
    assert len(digests) == len(values)


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        StoredValue.of([1, {"x": object()}], address("x"))
    assert caught.value.where == f"{address('x')}/1/x"


def test_a_header_that_says_it_is_longer_than_the_file_is_refused(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "last")
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(StateError, match="longer than the file"):
        read_shard(path)


def test_a_cache_takes_three_percent_more_than_its_values(tmp_path: Path) -> None:
    FeatureCache.create(tmp_path)
    cache = FeatureCache.open(tmp_path)
    writer = ShardWriter(cache, {"core": "1"}, max_bytes=2**20)
    for row in range(100):  # 50 kB each
        writer.add(address(f"latents {row}"), torch.zeros(16, 20, 25))
        writer.add(address(f"prompt {row}"), torch.zeros(77, 110, dtype=torch.bfloat16))
        writer.add(address(f"mask {row}"), torch.ones(77, dtype=torch.bool))
        writer.add(address(f"pooled {row}"), torch.zeros(400, dtype=torch.bfloat16))
    writer.flush()
    cache.write_index()
    # A plan adds an address for each value, and less than this for the sample itself.
    plan = 100 * (4 * 20 + 200)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cache.lengths.sum() == 100 * (32000 + 16940 + 77 + 800)
    assert size + plan <= 1.03 * cache.lengths.sum()


def test_a_part_of_a_large_tensor_does_not_keep_all_of_it() -> None:
    large = torch.zeros(1, 1000, 10)
    stored = StoredValue.of(large[:, :20], address("x"))
    (tensor,) = stored.tensors
    assert tensor.untyped_storage().nbytes() == stored.nbytes == 20 * 10 * 4
    whole = torch.zeros(9)
    assert StoredValue.of(whole, address("x")).tensors[0].data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_shard_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = write(tmp_path, "last")
    make_unreadable(monkeypatch, path, number)
    for read in (read_shard, data_start):
        with pytest.raises(SystemFault, match="cannot be read") as caught:
            read(path)
        assert os.strerror(number) in caught.value.what


def test_a_shard_that_is_gone_is_computed_again(tmp_path: Path) -> None:
    with pytest.raises(CacheError) as caught:
        read_shard(tmp_path / f"{'0' * 40}.safetensors")
    assert "fill the cache again" in caught.value.help_lines[0]
