"""`dstrain cache verify` reads every byte, and names every damaged file."""

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dstrain import StateError, SystemFault
from dstrain.cache import stored_plans
from dstrain.cache.backend.plan_files import commit_plans
from dstrain.cache.commands.listing import listing
from dstrain.cache.commands.verify import verify
from dstrain.cache.in_use import exclusive, readers
from dstrain.storage import write_columns

from tests.support.caching_project import Place, noise_image, write_rows
from tests.support.unreadable import make_unreadable

Printed = pytest.CaptureFixture[str]


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
def test_changed_bytes_are_named(place: Place, at: int, capsys: Printed) -> None:
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
    content = shard.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    shard.write_bytes(content[:begin] + bytes(len(content) - begin))
    with suppress(StateError):
        verify(place.cache)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{shard}: ") for line in lines) > 1


def test_a_missing_shard_makes_a_plan_partial(place: Place, capsys: Printed) -> None:
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


def test_damage_of_what_is_derived_is_named(place: Place, capsys: Printed) -> None:
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
    (plan,) = stored_plans(place.cache)
    table = plan.columns("samples")
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    columns["literal height"] = pa.array(['{"tensor": "x"}'] * 4).dictionary_encode()
    batch = pa.record_batch(columns)
    folder = plan.path.parent
    plan.record["columns"]["samples"] = write_columns(folder, batch.schema, [batch])
    commit_plans(place.cache, [plan.record])
    assert problems(place.cache, capsys).keys() == {plan.path}


@pytest.mark.parametrize("name", ["ls", "verify"])
def test_nothing_is_removed_while_a_cache_is_read(name: str, here: Path) -> None:
    cache = here / "whole"
    commands: dict[str, Callable[[], Any]] = {
        "ls": partial(listing, cache),
        "verify": partial(verify, cache),
    }
    with exclusive(cache), pytest.raises(StateError) as caught:
        commands[name]()
    assert caught.value.where == str(cache)
    commands[name]()
    assert readers(cache) == []
