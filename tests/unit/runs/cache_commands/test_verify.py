"""`dstrain cache verify` reads every byte, and names every damaged file."""

import pytest
from dstrain.errors import StateError
from dstrain.runs.cache_commands.verify import verified, verify

from tests.support.caching_project import Place


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
    with pytest.raises(StateError, match=r"is not a feature cache"):
        verified(shared_place.folder / name)
