"""A feature cache gives back what was put into it, takes no more room, and names every
damaged byte before use.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Frames, StateError
from dstrain.cache import FeatureCache, ShardWriter, as_text, packed, read_shard
from dstrain.storage import temporary
from PIL import Image

from tests.support.caching_project import address, noise_image, plain

VALUES = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "bf16": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
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
    "none of them": [],
}


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return empty(tmp_path / "store")


def empty(folder: Path) -> FeatureCache:
    FeatureCache.create(folder)
    return FeatureCache.open(folder)


def fill(cache: FeatureCache, values: dict[str, Any], **limits: Any) -> list[Path]:
    writer = ShardWriter(cache, {"core": "1"}, **limits)
    for name, value in values.items():
        writer.add(address(name), value)
    writer.flush()
    return sorted((cache.folder / "shards").iterdir())


@pytest.mark.parametrize("name", list(VALUES))
def test_every_kind_of_value_comes_back_as_it_was(
    cache: FeatureCache, name: str
) -> None:
    fill(cache, {name: VALUES[name]})
    read = FeatureCache.open(cache.folder).read(address(name))
    assert plain(read) == plain(VALUES[name])


def test_one_shard_holds_all_kinds_and_the_writer_can_read_it_at_once(
    cache: FeatureCache,
) -> None:
    assert len(fill(cache, VALUES)) == 1
    assert plain({name: cache.read(address(name)) for name in VALUES}) == plain(VALUES)


def test_equal_values_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (fill(empty(tmp_path / name), VALUES)[0] for name in "ab")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_a_tensor_that_was_read_is_the_readers_own(cache: FeatureCache) -> None:
    fill(cache, {"tensor": VALUES["tensor"]})
    cache.read(address("tensor")).zero_()
    assert torch.equal(cache.read(address("tensor")), VALUES["tensor"])


def test_a_view_is_stored_without_what_it_is_a_view_of(cache: FeatureCache) -> None:
    (path,) = fill(cache, {"view": torch.zeros(1000, 1000)[::100, ::100]})
    assert path.stat().st_size < 100 * 4 + 1000


def test_a_shard_is_committed_when_it_is_full_or_old(tmp_path: Path) -> None:
    values = {str(i): torch.full((256,), float(i)) for i in range(10)}
    assert len(fill(empty(tmp_path / "bytes"), values, max_bytes=2048)) == 5
    assert len(fill(empty(tmp_path / "seconds"), values, max_seconds=0.0)) == 10
    assert len(fill(empty(tmp_path / "neither"), values)) == 1


def test_what_is_cached_is_not_cached_again(cache: FeatureCache) -> None:
    before = fill(cache, {"a": torch.ones(2), "b": 1})
    assert fill(cache, {"a": torch.ones(2), "b": 1}) == before
    (added,) = set(fill(FeatureCache.open(cache.folder), {"b": 1, "c": 2})) - set(
        before
    )
    assert [as_text(row["address"]) for row in read_shard(added).rows] == [address("c")]


def test_more_shards_than_are_kept_open_can_be_read(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.cache.reading.OPEN_SHARDS", 2)
    fill(cache, {str(i): torch.tensor(i) for i in range(9)}, max_bytes=1)
    for i in range(18):
        assert int(cache.read(address(str(i % 9)))) == i % 9
        assert len(cache._files._mapped) <= 2


def test_only_temporaries_are_removed_when_a_cache_is_created_again(
    cache: FeatureCache,
) -> None:
    (kept,) = fill(cache, VALUES)
    strangers = [
        cache.folder / "metadata.csv",
        cache.folder / "shards/notes.txt",
        cache.folder / "plans/x",
    ]
    leftovers = [
        temporary(cache.folder / part / "x.safetensors")
        for part in ("", "shards", "index", "plans")
    ]
    for path in (*strangers, *leftovers):
        path.write_text("x")
    FeatureCache.create(cache.folder)
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in (kept, *strangers))
    assert set(FeatureCache.open(cache.folder)) == set(map(address, VALUES))


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        (None, "is not a feature cache"),
        ("{", "cannot be read"),
        ('{"format": "dstrain-features", "version": 1}', "of format 1, and this .* 3"),
        ('{"format": "dstrain-features", "version": 2}', "of format 2, and this .* 3"),
        ('{"format": "dstrain-features", "version": 4}', "of format 4, and this .* 3"),
        ('{"format": "other", "version": 2}', "another program wrote it"),
        ("[]", "another program wrote it"),
    ],
)
def test_what_is_no_cache_of_this_version_is_refused(
    cache: FeatureCache, marker: str | None, words: str
) -> None:
    path = cache.folder / "store.json"
    path.unlink() if marker is None else path.write_text(marker)
    with pytest.raises(StateError, match=words):
        FeatureCache.open(cache.folder)


class Payload:
    """A pickle that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_is_refused_unopened(cache: FeatureCache, tmp_path: Path) -> None:
    path = cache.folder / "shards" / f"{'0' * 40}.safetensors"
    path.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(StateError, match=f"{path.name}: cannot be read"):
        FeatureCache.open(cache.folder)
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(StateError, match=f"{path.name}: cannot be read"):
        FeatureCache.open(cache.folder)
    assert not (tmp_path / "ran").exists()


def test_a_safetensors_file_of_another_origin_is_refused(cache: FeatureCache) -> None:
    from safetensors.torch import save_file

    path = cache.folder / "shards/model.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(
        StateError, match=r"model\.safetensors: cannot be read: 'dstrain'"
    ):
        FeatureCache.open(cache.folder)


def test_a_shard_that_is_gone_is_named(cache: FeatureCache) -> None:
    (path,) = fill(cache, VALUES)
    path.unlink()
    with pytest.raises(StateError, match=path.name):
        cache.read(address("tensor"))
    with pytest.raises(StateError, match=f"lacks value {address('tensor')}"):
        FeatureCache.open(cache.folder).read(address("tensor"))


def test_a_shard_of_another_name_is_refused(cache: FeatureCache) -> None:
    (path,) = fill(cache, VALUES)
    path.rename(path.with_stem("0" * 40))
    with pytest.raises(StateError, match="its name is not the hash of its header"):
        FeatureCache.open(cache.folder)


def test_an_image_of_a_mode_that_would_lose_something_is_refused(
    cache: FeatureCache,
) -> None:
    from dstrain import UsageError

    with pytest.raises(
        UsageError, match="cannot be stored exactly: an image of mode CMYK"
    ):
        fill(cache, {"image": Image.new("CMYK", (1, 1))})


def test_values_are_found_and_read_by_number(cache: FeatureCache) -> None:
    fill(cache, {str(i): torch.tensor(i) for i in range(4)})
    cache = FeatureCache.open(cache.folder)
    cache.write_index()
    fill(cache, {str(i): torch.tensor(i) for i in range(4, 7)})
    wanted = packed([*(address(str(i)) for i in range(7)), "01" * 20])
    for opened in (cache, FeatureCache.open(cache.folder)):
        numbers = opened.locate(wanted)
        assert sorted(numbers.tolist()) == [-1, *range(7)]
        assert numbers[7] == -1
        assert [int(opened.read_at(number)) for number in numbers[:7]] == [*range(7)]
        assert (opened.addresses[numbers[:7]] == wanted[:7]).all()
        assert set(opened) == {as_text(one) for one in wanted[:7]}
        assert opened.lengths.tolist() == [8] * 7
        shards = opened.shard_numbers[numbers[:7]].tolist()
        assert shards == [shards[0]] * 4 + [shards[4]] * 3
        assert shards[0] != shards[4]


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"cache-\xff")
    FeatureCache.create(folder)
    with pytest.raises(StateError, match="has a name that is not UTF-8 text"):
        FeatureCache.open(folder)
