"""`dstrain cache export` writes what the chosen plans use, and nothing else."""

import tarfile
from pathlib import Path

import pytest
from dstrain import StateError, UsageError
from dstrain.cache import exclusive
from dstrain.runs import export
from dstrain.runs.cache_commands import exporting
from dstrain.runs.cache_commands.contents import Contents
from dstrain.runs.cache_commands.verify import verified

from tests.support.caching_project import Place, write_rows


@pytest.fixture
def two_plans(place: Place) -> Place:
    write_rows(place.data, place.rows[:2])
    place.fill()
    return place


def test_a_folder_is_a_cache_of_its_own(shared_place: Place, tmp_path: Path) -> None:
    export(shared_place.cache, tmp_path / "new/out", [])
    found = verified(tmp_path / "new/out")
    assert found.problems == ()
    assert found.values == verified(shared_place.cache).values
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_tar_has_plain_files_without_times_or_owners(
    shared_place: Place, tmp_path: Path
) -> None:
    for name in ("a.tar", "b.tar"):
        export(shared_place.cache, tmp_path / name, [])
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "r:") as tar:
        members = tar.getmembers()
    assert members[0].name == "store.json"
    assert members[-1].name.startswith("plans/")
    assert all(one.isreg() and one.mtime == one.uid == 0 for one in members)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "b.tar"]


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_of_several_plans_only_what_the_chosen_one_uses(
    two_plans: Place, tmp_path: Path, name: str
) -> None:
    new = Contents.of(two_plans.cache).plans[1]
    export(two_plans.cache, tmp_path / name, [new.path.stem[:7]])
    folder = tmp_path / "out"
    if name == "out.tar":
        with tarfile.open(tmp_path / name) as tar:
            tar.extractall(folder, filter="data")
    contents = Contents.of(folder)
    (plan,) = contents.plans
    assert plan.path.name == new.path.name
    assert contents.used_by([plan]).all()
    assert len(contents.addresses) == len(new.used)
    assert verified(folder).problems == ()


def test_an_output_that_exists_is_left_alone(
    shared_place: Place, tmp_path: Path
) -> None:
    (tmp_path / "out.tar").write_text("mine")
    (tmp_path / "out").mkdir()
    for name in ("out.tar", "out"):
        with pytest.raises(UsageError, match="existing files were not modified"):
            export(shared_place.cache, tmp_path / name, [])
    assert (tmp_path / "out.tar").read_text() == "mine"
    with pytest.raises(UsageError, match="would be compressed"):
        export(shared_place.cache, tmp_path / "out.tar.gz", [])


def test_a_damaged_or_incomplete_cache_is_refused_and_nothing_is_written(
    place: Place, tmp_path: Path
) -> None:
    whole = place.shards[0].read_bytes()
    place.shards[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for name in ("out", "out.tar"):
        with pytest.raises(StateError, match="is damaged"):
            export(place.cache, tmp_path / "to" / name, [])
    for path in place.shards:
        path.unlink()
    with pytest.raises(StateError, match="needs values that the cache lacks"):
        export(place.cache, tmp_path / "to/out", [])
    place.plans[0].unlink()
    with pytest.raises(StateError, match="contains no plan"):
        export(place.cache, tmp_path / "to/out", [])
    assert not list((tmp_path / "to").iterdir())


def test_nothing_is_removed_while_a_cache_is_exported(
    shared_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removing(folder: Path, path: Path) -> None:
        with pytest.raises(StateError, match="is being read by"), exclusive(folder):
            pass

    monkeypatch.setattr(exporting, "shard_problem", removing)
    export(shared_place.cache, tmp_path / "out.tar", [])
