"""`dstrain cache ls` counts rows, values and bytes, and says what is shared."""

from dstrain.cache import FeatureCache
from dstrain.cache.commands.listing import as_lines, listing
from dstrain.config import as_size

from tests.support.caching_family import GUIDED
from tests.support.caching_project import Place, write_rows


def test_values_are_counted_once_and_by_name(shared_place: Place) -> None:
    found = listing(shared_place.cache)
    units = {one["value"]: one for one in found["units"]}
    assert found["rows"] == 4
    assert found["values"] == len(FeatureCache.open(shared_place.cache))
    prompts = units["prompt_emb"]
    assert (prompts["samples"], prompts["values"]) == (4, 3)
    assert prompts["used_by_several_samples"] == 1
    assert prompts["mean_bytes"] == prompts["bytes"] // 3
    assert prompts["unit"] == "encode_prompt"
    assert units["input_latents"]["used_by_several_samples"] == 0
    assert units["reference"]["unit"] == "(input)"
    # Inputs that are no files are in the plan.
    assert "label" not in units
    assert sum(one["bytes"] for one in found["units"]) >= found["bytes"]
    on_disk = [path for path in shared_place.cache.rglob("*") if path.is_file()]
    sizes = sum(path.stat().st_size for path in on_disk)
    assert 0 < found["bytes"] < found["bytes_on_disk"] == sizes
    assert found["shards"] == len(shared_place.shards)
    (plan,) = found["plans"]
    assert (plan["model"], plan["variant"], plan["task"]) == ("stored", "base", "sft")
    assert (plan["rows"], plan["samples"], plan["prompt_rows"]) == (4, 4, 0)
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
    shared, unused = found["used_by_several_plans"], found["used_by_no_plan"]
    assert shared["bytes"] == found["plans"][1]["bytes"]
    assert unused == {"values": 0, "bytes": 0}
    # Another size is another plan of the same rows, and two are two samples of each.
    place.fill(resolution="16,32")
    again = listing(place.cache)
    assert again["rows"] == 6
    assert (again["plans"][2]["rows"], again["plans"][2]["samples"]) == (2, 4)
    count = again["used_by_several_plans"]["values"]
    assert f"used by several plans: {count} values" in as_lines(again)
    for path in place.plans:
        path.unlink()
    found = listing(place.cache)
    assert found["used_by_no_plan"]["values"] == again["values"]
    assert found["used_by_no_plan"]["bytes"] == again["bytes"]


def test_a_value_of_the_negative_branch_belongs_to_its_unit(place: Place) -> None:
    write_rows(place.data, [{**row, "negative_prompt": "blurry"} for row in place.rows])
    place.fill(GUIDED)
    units = {one["value"]: one["unit"] for one in listing(place.cache)["units"]}
    assert units["negative.prompt_emb"] == units["prompt_emb"] == "encode_prompt"


def test_it_is_written_for_people(shared_place: Place) -> None:
    listed = listing(shared_place.cache)
    head, *lines = as_lines(listed).splitlines()
    assert head.startswith(f"{shared_place.cache}: 4 rows, ")
    (units,) = (one for one in listed["units"] if one["value"] == "prompt_emb")
    sizes = [as_size(units[name]).split() for name in ("bytes", "mean_bytes")]
    said = ["prompt_emb", "encode_prompt", "4", "3", *sizes[0], *sizes[1], "1"]
    assert said in [line.split() for line in lines]
    assert any(line.startswith(shared_place.plans[0].stem[:8]) for line in lines)
