"""`dstrain cache ls` counts rows, values and bytes, and says what is shared."""

from dstrain.runs.cache_commands.listing import as_lines, listing

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


def test_it_is_written_for_people(shared_place: Place) -> None:
    text = as_lines(listing(shared_place.cache))
    assert text.startswith(f"{shared_place.cache}: 4 rows, ")
    assert "prompt_emb" in text
    assert "stored base" in text
    assert "used by no plan: 0 values" in text
