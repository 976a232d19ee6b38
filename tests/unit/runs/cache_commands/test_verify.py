"""`dstrain cache verify` reads every byte, and names every damaged file; with `--recompute`
it compares what is stored with what is computed.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dstrain import StateError, SystemFault, UsageError
from dstrain.cache import (
    FeatureCache,
    ShardWriter,
    commit_plans,
    exclusive,
    open_part,
    read_record,
    readers,
)
from dstrain.runs import Wanted, export, listing, recompute, show, verify
from dstrain.storage import write_columns
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.caching_project import Place, noise_image, write_rows
from tests.support.runs import train, weights_of
from tests.support.unreadable import make_unreadable

Printed = pytest.CaptureFixture[str]
Spare = Callable[[Path], Path]


def problems(folder: Path, printed: Printed) -> dict[Path, str]:
    """What `verify` prints of each damaged file."""
    with suppress(StateError):
        verify(folder)
    *lines, read = printed.readouterr().out.splitlines()
    assert read.startswith(f"{folder}: ")
    parts = (line.partition(": ") for line in lines)
    return {Path(path): what for path, _, what in parts}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_whole_cache_has_no_problems(shared_place: Place, capsys: Printed) -> None:
    verify(shared_place.cache)
    printed = capsys.readouterr().out
    values = listing(shared_place.cache)["values"]
    shards = len(shared_place.shards)
    assert re.findall(r"\d+ \w+", printed) == [
        *(f"{values} values", f"{shards} shard", "1 plan")
    ]


@pytest.mark.parametrize("at", [3, 100, -1])
def test_a_changed_byte_is_named_with_its_file(
    place: Place, at: int, capsys: Printed
) -> None:
    damaged = [*place.shards, *place.plans]
    for path in damaged:
        whole = path.read_bytes()
        flip(path, at)
        assert path in problems(place.cache, capsys)
        path.write_bytes(whole)
    for path in damaged:
        for one in {at, -1, path.stat().st_size // 2}:
            flip(path, one)
    assert problems(place.cache, capsys).keys() == set(damaged)
    with pytest.raises(StateError) as caught:
        verify(place.cache)
    assert caught.value.exit_code == 3
    assert caught.value.what.startswith(f"{len(damaged)} ")  # files, not values
    assert "--repair" in caught.value.help_lines[0]


def test_each_damaged_value_of_a_shard_is_named(place: Place, capsys: Printed) -> None:
    (shard,) = place.shards
    content = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = bytes(len(content) - begin)
    shard.write_bytes(content)
    with suppress(StateError):
        verify(place.cache)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{shard}: ") for line in lines) > 1


def test_a_missing_shard_makes_the_plan_incomplete(
    place: Place, capsys: Printed
) -> None:
    before = {*place.shards, *place.plans}
    noise_image(9).save(place.data / "9.png")
    write_rows(place.data, [*place.rows, {**place.rows[0], "image": "9.png"}])
    place.fill()
    (shard,) = set(place.shards) - before
    shard.unlink()
    ((path, what),) = problems(place.cache, capsys).items()
    assert {path} == set(place.plans) - before
    assert "1 of 5 samples" in what


@pytest.mark.parametrize("kind", ["shards/*", "plans/*.json", "plans/*.arrow"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = next(shared_place.cache.glob(kind))
    make_unreadable(monkeypatch, path, errno.EACCES)
    with pytest.raises(SystemFault, match="Permission denied") as caught:
        verify(shared_place.cache)
    assert caught.value.where == str(path)


def test_damage_of_what_is_made_from_other_files_is_named(
    place: Place, capsys: Printed
) -> None:
    (index,) = (place.cache / "index").iterdir()
    digests = place.cache / "digests.npy"
    for path, at in ((index, 200), (digests, -10)):
        whole = path.read_bytes()
        flip(path, at)
        assert problems(place.cache, capsys).keys() == {path}
        path.write_bytes(whole)
    digests.write_text("mine")
    assert problems(place.cache, capsys).keys() == {digests}
    # Neither is needed.
    for path in (index, digests):
        path.unlink()
    verify(place.cache)


def test_a_literal_that_is_none_is_named(place: Place, capsys: Printed) -> None:
    (plan,) = place.plans
    record = read_record(plan)
    table = open_part(plan.parent, record, "samples")
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    columns["literal height"] = pa.array(['{"tensor": "x"}'] * 4).dictionary_encode()
    batch = pa.record_batch(columns)
    record["columns"]["samples"] = write_columns(plan.parent, batch.schema, [batch])
    commit_plans(plan.parent, [record])
    assert problems(place.cache, capsys).keys() == {plan}


@pytest.mark.parametrize("name", ["ls", "verify", "recompute", "show", "export"])
def test_nothing_is_removed_while_a_cache_is_read(
    name: str, here: Path, tmp_path: Path
) -> None:
    cache = here / "whole"
    commands: dict[str, Callable[[], Any]] = {
        "ls": partial(listing, cache),
        "verify": partial(verify, cache),
        "recompute": partial(recompute, cache, 1, 0, [], {}),
        "show": partial(show, cache, tmp_path / "x.html", Wanted(None, (), 1, {})),
        "export": partial(export, cache, tmp_path / "out", []),
    }
    with exclusive(cache), pytest.raises(StateError) as caught:
        commands[name]()
    assert caught.value.where == str(cache)
    commands[name]()
    assert readers(cache) == []


def test_what_stage_1_stored_is_what_is_computed(here: Path, capsys: Printed) -> None:
    recompute(here / "whole", 4, 0, [], {})
    printed = capsys.readouterr().out
    assert "4 of 6 samples" in printed and "12 of 12 values" in printed
    with pytest.raises(UsageError) as caught:
        recompute(here / "whole", 4, 0, ["x"], {})
    assert caught.value.where == "--plan"


Change = Callable[[Tensor], Any]


def stored_otherwise(whole: Path, cache: Path, name: str, change: Change) -> None:
    """Copy a cache, with other values of this name."""
    shutil.copytree(whole, cache)
    for path in [*(cache / "shards").iterdir(), *(cache / "index").iterdir()]:
        path.unlink()
    source = FeatureCache.open(whole)
    ((path, _),) = source.plans()
    changed = {row["values"][name]["at"] for row in source.plan_rows(path)}
    writer = ShardWriter(FeatureCache.open(cache), {})
    for address in source:
        value = source.read(address)
        writer.add(address, change(value) if address in changed else value)
    writer.flush()


def in_the_first(value: Tensor) -> Tensor:
    value = value.clone()
    value.view(-1)[0] += 0.5
    return value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (in_the_first, "0.5"),
        (lambda value: value * float("nan"), "inf"),
        (lambda value: value.bfloat16(), "bfloat16"),
        (lambda value: value[:, :1], r"\[1, 1, "),
        (lambda value: "text", "'text'"),
        (lambda value: [value, value], "none"),
    ],
)
def test_values_are_compared_bit_for_bit_and_named_with_their_rows(
    change: Change, named: str, here: Path, tmp_path: Path, capsys: Printed
) -> None:
    stored_otherwise(here / "whole", tmp_path / "cache", "input_latents", change)
    verify(tmp_path / "cache")
    with pytest.raises(StateError) as caught:
        recompute(tmp_path / "cache", 6, 0, [], {})
    assert caught.value.where == str(tmp_path / "cache")
    printed = re.sub("plan .*", "", capsys.readouterr().out)
    places = re.findall(r"^metadata\.json:(\d): input_latents: ", printed, re.M)
    assert places == list("123456")
    assert len(re.findall(named, printed)) >= 6


def test_samples_are_spread_and_chosen_by_the_seed(
    here: Path, tmp_path: Path, capsys: Printed
) -> None:
    stored_otherwise(here / "whole", tmp_path / "cache", "input_latents", in_the_first)

    def rows(seed: int) -> list[int]:
        with pytest.raises(StateError):
            recompute(tmp_path / "cache", 3, seed, [], {})
        printed = capsys.readouterr().out
        return [int(row) - 1 for row in re.findall(r"metadata\.json:(\d)", printed)]

    chosen = [rows(seed) for seed in range(6)]
    assert all([row // 2 for row in found] == [0, 1, 2] for found in chosen)
    later = {"feature_cache": tmp_path / "cache", "max_pixels": 128}
    train(here, task="sft:data_process", **later)  # a plan in which nothing differs
    assert rows(0) == chosen[0]
    assert len({tuple(found) for found in chosen}) > 1


def test_models_and_data_may_be_elsewhere(
    here: Path, tmp_path: Path, spare: Spare, capsys: Printed
) -> None:
    for name in ("data", "model"):
        spare(here / name).rename(tmp_path / name)
    with pytest.raises((UsageError, StateError)):
        recompute(here / "whole", 2, 0, [], {})
    paths = json.dumps(list(weights_of(tmp_path / "model").values()))
    for model in ({"model_paths": paths}, {"model_id": f"{tmp_path}/model"}):
        places = {"dataset_base_path": tmp_path / "data", **model}
        recompute(here / "whole", 2, 0, [], places)
    assert capsys.readouterr().out.count("6 of 6 values") == 2


@pytest.mark.parametrize(
    "name", ["data/metadata.json", "model/vae/model-1-of-1.safetensors"]
)
def test_what_is_not_that_of_the_plan_is_refused(
    name: str, here: Path, spare: Spare
) -> None:
    path = spare(here / name)
    if path.suffix == ".json":
        path.write_text(path.read_text().replace("cat", "cow"))
    else:
        weights = {name: value * 1.001 for name, value in load_file(path).items()}
        save_file(weights, path)
    with pytest.raises(StateError, match=str(path)):
        recompute(here / "whole", 2, 0, [], {})
