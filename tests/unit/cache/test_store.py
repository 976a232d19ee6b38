"""A feature cache gives back what was put into it, and takes no more room."""

import gc
import json
import os
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import Frames, StateError
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.addresses import as_text, packed
from dstrain.cache.backend.index import create_cache
from dstrain.cache.backend.shards import read_shard
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.caching_project import address, noise_image, plain

VALUES = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "bf16": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "view": torch.arange(24).reshape(4, 6).T[2:4],
    "complex": torch.ones(2, dtype=torch.complex64),
    "text": 'ä "quoted"\n\u2028',
    "number": 7,
    "exact": 0.1 + 0.2,
    "yes": True,
    "nothing": None,
    "grey": noise_image(1, "L"),
    "colour": noise_image(2),
    "alpha": noise_image(3, "RGBA"),
    "frames": Frames(torch.arange(24, dtype=torch.uint8).reshape(1, 2, 4, 3), 29.97),
    "list": [torch.ones(1), [torch.zeros(2), "x"], {}],
    "record": {"value": torch.ones(3), "shape": [1, None], "tensor": {"list": 2.0}},
    "odd": {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(1)},
    "none of them": [],
}


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return empty(tmp_path / "store")


def empty(folder: Path) -> FeatureCache:
    create_cache(folder)
    return FeatureCache.open(folder)


def fill(cache: FeatureCache, values: Mapping[str, Any], **limits: Any) -> list[Path]:
    writer = ShardWriter(cache, {"core": "1"}, **limits)
    for name, value in values.items():
        writer.add(address(name), value)
    writer.flush()
    return sorted((cache.folder / "shards").iterdir())


def refused(folder: Path, where: Path) -> None:
    """Open a cache that cannot be used for what is wrong in a place."""
    with pytest.raises(StateError) as caught:
        FeatureCache.open(folder)
    assert caught.value.where == str(where)


def test_every_kind_of_value_comes_back_as_the_readers_own(cache: FeatureCache) -> None:
    (path,) = fill(cache, VALUES)
    assert read_shard(path).about == {"core": "1"}
    # By the writer at once, and by others.
    for opened in (cache, FeatureCache.open(cache.folder)):
        for _ in range(2):
            for name, value in VALUES.items():
                found = opened.read(address(name))
                assert plain(found) == plain(value), name
                if isinstance(found, torch.Tensor):
                    found.zero_()


def test_equal_values_give_equal_bytes_in_whatever_order(tmp_path: Path) -> None:
    turned = {name: VALUES[name] for name in reversed(VALUES)}
    (first,) = fill(empty(tmp_path / "a"), VALUES)
    (second,) = fill(empty(tmp_path / "b"), turned)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_other_programs_read_a_shard_of_aligned_tensors(cache: FeatureCache) -> None:
    (path,) = fill(cache, VALUES)
    addresses = [as_text(row["address"]) for row in read_shard(path).rows]
    number = addresses.index(address("odd"))
    with safe_open(path, "pt") as file:
        for name, tensor in VALUES["odd"].items():
            assert torch.equal(file.get_tensor(f"{number}/{name}"), tensor)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    del header["__metadata__"]
    for name, entry in header.items():
        alignment = {"F32": 4, "C64": 4, "BF16": 2, "I64": 8}.get(entry["dtype"], 1)
        assert entry["data_offsets"][0] % alignment == 0, name


def test_a_view_is_stored_without_what_it_is_a_view_of(cache: FeatureCache) -> None:
    large = torch.zeros(1000, 1000)
    storage = StorageWeakRef(large.untyped_storage())
    writer = ShardWriter(cache, {})
    writer.add(address("view"), large[::100, ::100])
    writer.add(address("part"), large[:20])
    del large
    gc.collect()
    assert storage.expired()
    writer.flush()
    (path,) = (cache.folder / "shards").iterdir()
    assert path.stat().st_size < (100 + 20 * 1000) * 4 + 1500


def test_a_cache_takes_three_percent_more_than_its_values(cache: FeatureCache) -> None:
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
    files = [path for path in cache.folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert cache.index.length.sum() == 100 * (32000 + 16940 + 77 + 800)
    assert size + plan <= 1.03 * cache.index.length.sum()


def test_a_shard_is_committed_when_it_is_full_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {str(i): torch.full((256,), float(i)) for i in range(10)}
    assert len(fill(empty(tmp_path / "bytes"), values, max_bytes=2048)) == 5
    assert len(fill(empty(tmp_path / "seconds"), values, max_seconds=0.0)) == 10
    assert len(fill(empty(tmp_path / "neither"), values)) == 1
    # Ten seconds pass with each value: after a minute the next shard begins.
    clock = SimpleNamespace(monotonic=count(time.monotonic(), 10).__next__)
    monkeypatch.setattr("dstrain.cache.store.time", clock)
    assert len(fill(empty(tmp_path / "a minute"), values)) == 2


def test_what_is_cached_is_not_cached_again(cache: FeatureCache) -> None:
    before = fill(cache, {"a": torch.ones(2), "b": 1})
    assert fill(cache, {"a": torch.ones(2), "b": 1}) == before
    later = fill(FeatureCache.open(cache.folder), {"b": 1, "c": 2})
    (added,) = set(later) - set(before)
    assert [as_text(row["address"]) for row in read_shard(added).rows] == [address("c")]


def test_values_are_found_and_read_by_number(cache: FeatureCache) -> None:
    told = [0, 1, 2, 3, [4], [5], [6]]
    numbers = [torch.tensor(number) for number in told]
    fill(cache, {str(i): numbers[i] for i in range(4)})
    cache = FeatureCache.open(cache.folder)
    cache.write_index()
    fill(cache, {str(i): numbers[i] for i in range(4, 7)})
    wanted = packed([*(address(str(i)) for i in range(7)), "01" * 20])
    for opened in (cache, FeatureCache.open(cache.folder)):
        found = opened.locate(wanted)
        assert sorted(found.tolist()) == [-1, *range(7)]
        assert found[7] == -1
        assert [opened.read_at(number).tolist() for number in found[:7]] == told
        assert (opened.index.addresses[found[:7]] == wanted[:7]).all()
        assert set(opened) == {as_text(one) for one in wanted[:7]}
        assert opened.index.length.tolist() == [8] * 7
        shards = opened.index.shard[found[:7]].tolist()
        assert shards == [shards[0]] * 4 + [shards[4]] * 3
        assert shards[0] != shards[4]
        assert as_text(wanted[3]) in opened
        assert "no address" not in opened


def test_what_is_no_cache_of_this_version_is_refused(cache: FeatureCache) -> None:
    path = cache.folder / "store.json"
    own = json.loads(path.read_text())
    others = [own | {"version": 2}, own | {"version": 4}, own | {"format": "other"}, []]
    for content in ("{", *map(json.dumps, others)):
        path.write_text(content)
        refused(cache.folder, path)
    path.unlink()
    refused(cache.folder, cache.folder)


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"cache-\xff")
    with pytest.raises(StateError):
        create_cache(folder)
    create_cache(tmp_path / "cache")
    (tmp_path / "cache").rename(folder)
    refused(folder, folder)


def test_a_file_of_another_origin_is_refused_and_stays(cache: FeatureCache) -> None:
    path = cache.folder / "shards/model.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(StateError) as caught:
        FeatureCache.open(cache.folder)
    assert caught.value.where == str(path)
    assert "delete" not in str(caught.value)
