"""`dstrain cache prune` removes what no plan uses, and nothing else."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from dstrain import StateError, UsageError
from dstrain.cache import FeatureCache, ShardWriter
from dstrain.cache.backend.index import create_cache
from dstrain.cache.backend.shards import read_shard
from dstrain.cache.commands.listing import listing
from dstrain.cache.commands.prune import prune
from dstrain.config import as_size
from dstrain.storage import lock, temporary

from tests.support.caching_project import Place, write_rows
from tests.support.crashes import events, killed_at

Printed = pytest.CaptureFixture[str]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".dstrain.lock")
    }


def old_plan(place: Place) -> str:
    name: str = listing(place.cache)["plans"][0]["name"]
    return name


def in_a_shard_too(place: Place, addresses: list[str]) -> Path:
    """Put a shard into the cache that has these of its values too."""
    other = FeatureCache.open(place.cache)
    create_cache(place.folder / "other")
    about = read_shard(place.shards[0]).about
    writer = ShardWriter(FeatureCache.open(place.folder / "other"), about)
    for address in addresses:
        writer.add(address, other.read(address))
    writer.flush()
    (path,) = (place.folder / "other/shards").iterdir()
    return Path(shutil.copy(path, place.cache / "shards"))


def used_by_the_newest_plan(place: Place) -> list[str]:
    values = [row["values"].values() for row in place.stored().rows]
    return sorted({one["at"] for row in values for one in row if "at" in one})


def test_what_goes_is_listed_and_nothing_is_removed_unless_that_is_wanted(
    two_plans: Place, capsys: Printed
) -> None:
    before = files(two_plans.cache)
    name, used = old_plan(two_plans), used_by_the_newest_plan(two_plans)
    found = listing(two_plans.cache)
    unused = found["values"] - len(used)
    size = as_size(found["bytes"] - found["plans"][1]["bytes"])
    for given, ask in ((name[:6], None), (name, lambda: False)):
        prune(two_plans.cache, [given], False, ask)
        plan, values, *_ = capsys.readouterr().out.splitlines()
        assert name in plan and "4 rows" in plan
        assert values.startswith(f"{unused} values") and values.endswith(f" {size}")
        assert files(two_plans.cache) == before


def test_a_plan_goes_with_the_values_that_only_it_uses(two_plans: Place) -> None:
    want = two_plans.values()
    prune(two_plans.cache, [old_plan(two_plans)], True, None)
    found = listing(two_plans.cache)
    assert [plan["rows"] for plan in found["plans"]] == [2]
    assert found["used_by_no_plan"]["values"] == 0
    assert found["values"] == len(used_by_the_newest_plan(two_plans))
    assert two_plans.values() == want
    assert not two_plans.fill()


def test_a_terminal_is_asked_if_there_is_anything_to_remove(
    two_plans: Place, capsys: Printed
) -> None:
    prune(two_plans.cache, [old_plan(two_plans)], False, lambda: True)
    (name,) = [plan["name"] for plan in listing(two_plans.cache)["plans"]]
    capsys.readouterr()
    prune(two_plans.cache, [], False, lambda: pytest.fail("there is nothing to ask"))
    # What is left is named.
    assert name[:8] in capsys.readouterr().out
    left = temporary(two_plans.cache / "plans/x.json")
    left.write_text("half")
    prune(two_plans.cache, [], False, lambda: True)
    assert not left.exists()


def test_of_a_cache_without_plans_files_of_others_are_left(place: Place) -> None:
    place.plans[0].unlink()
    shards = place.cache / "shards"
    (shards / "notes.txt").write_text("mine")
    temporary(shards / "x.safetensors").write_text("half")
    (shards / ".tmp-1-notes").write_text("mine too")
    prune(place.cache, [], True, None)
    assert {path.name for path in place.shards} == {"notes.txt", ".tmp-1-notes"}
    assert not place.columns


def test_values_of_two_shards_are_kept_once(place: Place, capsys: Printed) -> None:
    want, half = place.values(), sorted(FeatureCache.open(place.cache))[::2]
    in_a_shard_too(place, half)
    capsys.readouterr()
    prune(place.cache, [], True, None)
    assert capsys.readouterr().out.startswith(f"{len(half)} values")
    on_disk = [FeatureCache.of_shards(place.cache, [path]) for path in place.shards]
    assert sum(map(len, on_disk)) == listing(place.cache)["values"]
    assert place.values() == want


def test_a_new_shard_may_have_the_name_of_one_that_goes(two_plans: Place) -> None:
    want = two_plans.values()
    again = in_a_shard_too(two_plans, used_by_the_newest_plan(two_plans))
    prune(two_plans.cache, [old_plan(two_plans)], True, None)
    assert two_plans.shards == [again]
    assert two_plans.values() == want


def test_a_name_must_mean_one_plan(two_plans: Place) -> None:
    old = two_plans.cache / f"plans/{old_plan(two_plans)}.json"
    begins = old.stem[:-1]
    shutil.copy(old, old.with_stem(begins + ("1" if old.stem[-1] == "0" else "0")))
    for name in ("x", "", old.stem + "0", begins):
        with pytest.raises(UsageError, match=f"'{name}'") as caught:
            prune(two_plans.cache, [name], True, None)
        assert caught.value.where == "--plan"
        assert old.stem in str(caught.value)


def test_a_cache_that_is_written_or_damaged_is_refused(two_plans: Place) -> None:
    name = old_plan(two_plans)
    before = files(two_plans.cache)
    with lock(two_plans.cache), pytest.raises(StateError):
        prune(two_plans.cache, [name], True, None)
    assert files(two_plans.cache) == before
    (shard,) = two_plans.shards
    content = shard.read_bytes()
    shard.write_bytes(content[:-4096] + bytes(4096))
    with pytest.raises(StateError, match=str(shard)):
        prune(two_plans.cache, [name], True, None)
    assert two_plans.shards == [shard]
    shard.write_bytes(content)
    plan = two_plans.plans[0]
    plan.write_bytes(plan.read_bytes()[:-9])
    with pytest.raises(StateError, match=str(plan)):
        prune(two_plans.cache, [], True, None)


def test_killed_at_any_moment_it_loses_nothing_that_a_plan_uses(
    two_plans: Place, tmp_path: Path
) -> None:
    """Shards that go as a whole make room for those that are written."""
    want, rows = two_plans.values(), two_plans.rows
    write_rows(two_plans.data, [{**row, "prompt": "other"} for row in rows])
    two_plans.fill()
    write_rows(two_plans.data, rows[:2])
    plans = listing(two_plans.cache)["plans"]
    names = [plan["name"] for plan in (plans[0], plans[2])]
    # One of which some stays, and one of which nothing does.
    before = {path.name for path in two_plans.shards}
    assert len(before) == 2
    whole = tmp_path / "whole"
    shutil.copytree(two_plans.cache, whole)
    body = partial(prune, two_plans.cache, names, True, None)
    total = events(body, two_plans.cache)
    assert total >= 5
    pruned = files(two_plans.cache)
    for event in range(0, total, 2):
        shutil.rmtree(two_plans.cache)
        shutil.copytree(whole, two_plans.cache)
        assert killed_at(event, body, two_plans.cache, torn=bool(event % 4))
        assert two_plans.values() == want, event
        shards = {path.name for path in two_plans.shards}
        assert shards <= before or len(shards & before) < 2, event
        there = [path.stem for path in two_plans.plans]
        prune(two_plans.cache, [name for name in names if name in there], True, None)
        assert files(two_plans.cache) == pruned, event
