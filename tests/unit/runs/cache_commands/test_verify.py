"""`dstrain cache verify` reads every byte, and names every damaged file."""

import errno
from pathlib import Path

import pyarrow as pa
import pytest
from dstrain import StateError, SystemFault
from dstrain.cache import commit_plans, exclusive, open_part, read_record
from dstrain.runs import verify
from dstrain.runs.cache_commands import verify as verifying
from dstrain.runs.cache_commands.verify import Problem, verified
from dstrain.storage import write_columns

from tests.support.caching_project import Place
from tests.support.unreadable import make_unreadable


def test_a_whole_cache_has_no_problems(
    shared_place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verified(shared_place.cache)
    assert found.problems == ()
    assert (found.shards, found.plans) == (len(shared_place.shards), 1)
    verify(shared_place.cache)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{shared_place.cache}: read {found.values} values")


@pytest.mark.parametrize("at", [3, 100, -1])
@pytest.mark.parametrize("kind", ["shards", "plans"])
def test_a_changed_byte_is_named_with_its_file(
    place: Place, kind: str, at: int
) -> None:
    path = {"shards": place.shards, "plans": place.plans}[kind][0]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    found = verified(place.cache)
    assert path in {problem.path for problem in found.problems}
    with pytest.raises(StateError, match="are damaged or incomplete") as caught:
        verify(place.cache)
    assert caught.value.exit_code == 3


def test_a_missing_shard_makes_the_plan_incomplete(place: Place) -> None:
    for path in place.shards:
        path.unlink()
    (problem,) = verified(place.cache).problems
    assert problem.path == place.plans[0]
    assert "for 4 of 4 samples" in problem.what


def test_several_damaged_files_are_all_named(place: Place) -> None:
    damaged = [*place.shards, *place.plans]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:50])
    assert {one.path for one in verified(place.cache).problems} == set(damaged)


@pytest.mark.parametrize("name", ["data", "data/metadata.csv", "nothing"])
def test_what_is_no_cache_is_refused(shared_place: Place, name: str) -> None:
    why = "it does not exist" if name == "nothing" else "store.json not found"
    with pytest.raises(StateError, match=f"is not a feature cache: {why}"):
        verified(shared_place.folder / name)


@pytest.mark.parametrize("kind", ["shards/*", "plans/*.json", "plans/*.arrow"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = next(shared_place.cache.glob(kind))
    make_unreadable(monkeypatch, path, errno.EACCES)
    with pytest.raises(SystemFault, match="cannot be read: Permission denied"):
        verified(shared_place.cache)


def test_nothing_is_removed_while_a_cache_is_verified(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def removing(folder: Path) -> list[Problem]:
        with pytest.raises(StateError, match="is being read by"), exclusive(folder):
            pass
        tried.append(folder)
        return []

    monkeypatch.setattr(verifying, "derived_problems", removing)
    verify(shared_place.cache)
    assert tried == [shared_place.cache]
    with exclusive(shared_place.cache):
        pass


def test_damage_of_what_is_made_from_other_files_is_named(place: Place) -> None:
    (index,) = (place.cache / "index").iterdir()
    digests = place.cache / "digests.npy"
    for path, at in ((index, 200), (digests, -10)):
        whole = path.read_bytes()
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        (problem,) = verified(place.cache).problems
        assert problem.path == path
        assert problem.what.startswith("is damaged")
        path.write_bytes(whole)
    digests.write_text("mine")
    (problem,) = verified(place.cache).problems
    assert problem.what == "is nothing that stage 1 writes, and is not used"


def test_an_index_is_not_needed(place: Place) -> None:
    for path in (place.cache / "index").iterdir():
        path.unlink()
    (place.cache / "digests.npy").unlink()
    assert verified(place.cache).problems == ()


def test_a_literal_that_is_none_is_named(place: Place) -> None:
    (plan,) = place.plans
    record = read_record(plan)
    table = open_part(plan.parent, record, "samples")
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    columns["literal height"] = pa.array(['{"tensor": "x"}'] * 4).dictionary_encode()
    batch = pa.record_batch(columns)
    record["columns"]["samples"] = write_columns(plan.parent, batch.schema, [batch])
    commit_plans(plan.parent, [record])
    (problem,) = verified(place.cache).problems
    assert problem.path == plan
    assert "is nothing that stage 1 writes" in problem.what
