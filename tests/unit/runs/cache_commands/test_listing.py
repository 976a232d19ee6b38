"""`dstrain cache ls` counts rows, values and bytes, and says what is shared."""

from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.cache import exclusive, readers
from dstrain.runs import as_lines, listing
from dstrain.runs.cache_commands.contents import Contents

from tests.support.caching_project import Place, write_rows


def test_values_are_counted_once_and_by_name(shared_place: Place) -> None:
    found = listing(shared_place.cache)
    units = {one["value"]: one for one in found["units"]}
    assert found["rows"] == 4
    assert units["prompt_emb"]["samples"] == 4
    assert units["prompt_emb"]["values"] == 3
    assert units["prompt_emb"]["used_by_several_samples"] == 1
    assert units["prompt_emb"]["unit"] == "encode_prompt"
    assert units["input_latents"]["used_by_several_samples"] == 0
    assert sum(one["bytes"] for one in found["units"]) >= found["bytes"]
    assert found["bytes"] < found["bytes_on_disk"]
    (plan,) = found["plans"]
    assert (plan["model"], plan["variant"], plan["task"]) == ("stored", "base", "sft")
    assert plan["dataset"] == str(shared_place.data / "metadata.csv")
    assert plan["bytes"] == found["bytes"]


def test_what_plans_share_and_what_none_uses(place: Place) -> None:
    before = listing(place.cache)
    write_rows(place.data, place.rows[:2])
    place.fill()
    found = listing(place.cache)
    assert [plan["rows"] for plan in found["plans"]] == [4, 2]
    assert found["rows"] == 6  # of two tables
    assert found["values"] == before["values"]
    assert found["used_by_several_plans"]["values"] > 0
    assert found["used_by_no_plan"] == {"values": 0, "bytes": 0}
    place.plans[0].unlink()
    place.plans[0].unlink()
    found = listing(place.cache)
    assert found["used_by_no_plan"]["values"] == before["values"]
    assert found["used_by_no_plan"]["bytes"] == before["bytes"]


def test_it_is_a_reader_under_which_nothing_is_removed(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_place.cache
    files = [path for path in folder.rglob("*") if path.is_file()]
    on_disk = sum(path.stat().st_size for path in files)
    seen = []
    whole = Contents.of

    def look(folder: Path) -> Contents:
        seen.append(len(readers(folder)))
        return whole(folder)

    monkeypatch.setattr(Contents, "of", look)
    assert listing(folder)["bytes_on_disk"] == on_disk
    assert seen == [1]
    with (
        exclusive(folder),
        pytest.raises(StateError, match="values are being removed"),
    ):
        listing(folder)


def test_a_file_that_stage_1_renames_meanwhile_is_no_hindrance(
    shared_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(shared_place.cache)
    present = Path.rglob

    def with_one_that_is_gone(folder: Path, pattern: str) -> list[Path]:
        return [*present(folder, pattern), folder / "shards/.tmp-gone"]

    monkeypatch.setattr(Path, "rglob", with_one_that_is_gone)
    monkeypatch.setattr(Path, "is_file", lambda path: not path.is_dir())
    assert listing(shared_place.cache) == before


def test_it_is_written_for_people(shared_place: Place) -> None:
    text = as_lines(listing(shared_place.cache))
    assert text.startswith(f"{shared_place.cache}: 4 rows, ")
    assert "prompt_emb" in text
    assert "stored base" in text
    assert "used by no plan: 0 values" in text
