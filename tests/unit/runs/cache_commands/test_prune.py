"""`dstrain cache prune` removes what no plan uses, and nothing else."""

import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest
from dstrain import StateError, UsageError
from dstrain.cache import FeatureCache, as_text
from dstrain.runs import prune
from dstrain.runs.cache_commands.contents import Contents
from dstrain.runs.cache_commands.shards import rewrite_shard
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


@pytest.fixture
def two_plans(place: Place) -> Place:
    """A cache whose second plan, of the dataset as it is, uses some of its values."""
    write_rows(place.data, place.rows[:2])
    place.fill()
    return place


def old_plan(place: Place) -> str:
    """The name of the plan of all four rows."""
    return Contents.of(place.cache).plans[0].path.stem


def test_what_goes_is_listed_and_nothing_is_removed_unless_that_is_wanted(
    two_plans: Place, capsys: Printed
) -> None:
    before = files(two_plans.cache)
    prune(two_plans.cache, [old_plan(two_plans)[:6]], False, None)
    printed = capsys.readouterr().out
    assert "4 rows of" in printed
    assert "that no plan uses" in printed
    assert "nothing was removed" in printed
    prune(two_plans.cache, [old_plan(two_plans)], False, lambda: False)
    assert "nothing was removed" in capsys.readouterr().out
    assert files(two_plans.cache) == before


def test_a_plan_goes_with_the_values_that_only_it_uses(two_plans: Place) -> None:
    want = two_plans.values()
    prune(two_plans.cache, [old_plan(two_plans)], True, None)
    contents = Contents.of(two_plans.cache)
    (plan,) = contents.plans
    assert contents.used_by([plan]).all()
    assert two_plans.values() == want
    assert not two_plans.fill()  # it has all that stage 1 would compute


def test_a_terminal_is_asked(two_plans: Place, capsys: Printed) -> None:
    prune(two_plans.cache, [old_plan(two_plans)], False, lambda: True)
    assert len(Contents.of(two_plans.cache).plans) == 1
    prune(two_plans.cache, [], False, lambda: pytest.fail("there is nothing to ask"))
    assert "nothing to remove" in capsys.readouterr().out


def test_of_a_cache_without_plans_nothing_is_left(place: Place) -> None:
    place.plans[0].unlink()
    foreign = place.cache / "shards/notes.txt"
    foreign.write_text("mine")
    dead = temporary(place.cache / "shards/x.safetensors")
    dead.write_text("half")
    (place.cache / "shards/.tmp-1-notes").write_text("mine too")
    prune(place.cache, [], True, None)
    assert {path.name for path in place.shards} == {"notes.txt", ".tmp-1-notes"}


def test_values_that_two_shards_have_are_kept_once(place: Place) -> None:
    want = place.values()
    path = place.shards[0]
    half = sorted(FeatureCache.open(place.cache))[::2]
    copy = place.folder / "copy"
    shutil.copytree(place.cache, copy)
    rewrite_shard(copy, copy / "shards" / path.name, half)
    for one in (copy / "shards").iterdir():
        shutil.copy(one, place.cache / "shards")
    prune(place.cache, [], True, None)
    contents = Contents.of(place.cache)
    assert contents.held.sum() == len(contents.addresses)
    assert place.values() == want


def test_what_goes_as_a_whole_goes_before_anything_is_written(
    two_plans: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = two_plans.values()
    kept = [plan.path for plan in Contents.of(two_plans.cache).plans[1:]]
    for number in range(3):
        rows = [{**row, "prompt": f"other {number}"} for row in two_plans.rows]
        write_rows(two_plans.data, rows)
        two_plans.fill()
    assert len(two_plans.shards) == 4
    sizes = []

    def rewrite(folder: Path, path: Path, values: Collection[str]) -> None:
        sizes.append(len(values))
        rewrite_shard(folder, path, values)

    monkeypatch.setattr("dstrain.runs.cache_commands.prune.rewrite_shard", rewrite)
    names = [path.stem for path in two_plans.plans if path not in kept]
    prune(two_plans.cache, names, True, None)
    assert sizes[:3] == [0, 0, 0]
    assert len(sizes) == 4
    write_rows(two_plans.data, two_plans.rows[:2])
    assert two_plans.values() == want


def test_a_shard_written_anew_may_have_the_name_of_one_that_goes(
    two_plans: Place,
) -> None:
    want = two_plans.values()
    (path,) = two_plans.shards
    contents = Contents.of(two_plans.cache)
    (plan,) = contents.plans[1:]
    used = [as_text(one) for one in contents.addresses[plan.used]]
    copy = two_plans.folder / "copy"
    shutil.copytree(two_plans.cache, copy)
    rewrite_shard(copy, copy / "shards" / path.name, used)
    (again,) = (copy / "shards").iterdir()
    shutil.copy(again, two_plans.cache / "shards")
    prune(two_plans.cache, [old_plan(two_plans)], True, None)
    assert [one.name for one in two_plans.shards] == [again.name]
    assert two_plans.values() == want


def test_a_name_must_mean_one_plan(two_plans: Place) -> None:
    with pytest.raises(UsageError, match=r"no plan named 'x'; plans: "):
        prune(two_plans.cache, ["x"], True, None)
    with pytest.raises(UsageError, match="no plan named ''"):
        prune(two_plans.cache, [""], True, None)
    with pytest.raises(UsageError, match="no plan named"):
        prune(two_plans.cache, [old_plan(two_plans) + "0"], True, None)


def test_a_cache_that_is_written_or_damaged_is_refused(two_plans: Place) -> None:
    before = files(two_plans.cache)
    with lock(two_plans.cache), pytest.raises(StateError, match="is in use by process"):
        prune(two_plans.cache, [old_plan(two_plans)], True, None)
    path = two_plans.plans[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StateError, match="is damaged"):
        prune(two_plans.cache, [], True, None)
    assert {**files(two_plans.cache), str(path.relative_to(two_plans.cache)): b""} == {
        **before,
        str(path.relative_to(two_plans.cache)): b"",
    }


@pytest.mark.slow
def test_killed_at_any_moment_it_loses_nothing_that_a_plan_uses(
    two_plans: Place, tmp_path: Path
) -> None:
    want = two_plans.values()
    name = old_plan(two_plans)
    whole = tmp_path / "whole"
    shutil.copytree(two_plans.cache, whole)
    body = partial(prune, two_plans.cache, [name], True, None)
    total = events(body, two_plans.cache)
    assert total >= 5
    pruned = files(two_plans.cache)
    for event in range(total):
        shutil.rmtree(two_plans.cache)
        shutil.copytree(whole, two_plans.cache)
        assert killed_at(event, body, two_plans.cache, torn=bool(event % 2))
        assert two_plans.values() == want, event
        names = [name] if (two_plans.cache / f"plans/{name}.json").exists() else []
        prune(two_plans.cache, names, True, None)
        assert files(two_plans.cache) == pruned, event
