"""Names of recipes, goals and cards are completed, and the options are checked."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import TrainConfig, UsageError, run
from dstrain.config import as_flags, read_resolved, validate, write_resolved
from dstrain_planner.recipes.record import card_size

Complete = Callable[..., list[str]]
Install = Callable[..., Path]


def test_recipes_are_completed(completed: Complete) -> None:
    for words in ("--recipe",), ("train", "--recipe"), ("recipes", "show"):
        for typed in "qwen-image-ch", "Qwen_image-ch":
            found = completed(*words, typed)
            assert "qwen-image-character-24gb" in found
            assert all(one.startswith("qwen-image-character-") for one in found)
        assert {one.split("-")[0] for one in completed(*words, "")} == {
            *("flux", "flux2", "qwen", "sdxl", "wan", "z")
        }
        assert completed(*words, "qwen-image-nothing") == []
    assert completed("recipes", "--model", "qw") == ["qwen_image"]


def test_a_broken_family_keeps_no_recipe_of_others_and_nothing_is_printed(
    fake_plugin: Install, lines: Complete
) -> None:
    modules = {"leaves_record": "print('hello')\nraise KeyError('gone')"}
    fake_plugin("plugin-leaves", {"leaves": "leaves_record:MODEL"}, modules)
    found = lines("--recipe", "")
    assert "plain,wan-character-24gb" in found
    assert all(one.startswith("plain,") for one in found)
    assert lines("--recipe", "leaves-") == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("0.5GiB", 2**29),
        ("512MiB", 2**29),
        ("500MB", 5 * 10**8),
    ],
)
def test_a_size_is_understood(text: str, size: int) -> None:
    assert card_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-24GB", "24 KB", "1e9", "24GB"])
def test_what_is_no_size_and_a_size_without_a_dry_run_are_refused(text: str) -> None:
    planned = text != "24GB"
    config = TrainConfig(model="m", toy=True, dry_run=planned, device_memory=text)
    with pytest.raises(UsageError) as refused:
        validate(config)
    assert refused.value.where == "--device_memory"


def test_a_script_is_told_that_a_recipe_would_set_nothing() -> None:
    with pytest.raises(UsageError, match="would set nothing") as refused:
        run(TrainConfig(model="flux", toy=True, recipe="flux-style-24gb"))
    assert refused.value.where == "--recipe"


def test_a_run_records_its_recipe_beside_its_options(tmp_path: Path) -> None:
    config = TrainConfig(model="m", recipe="m_Style-24gb")
    (tmp_path / "logs").mkdir()
    write_resolved(tmp_path / "logs/config.json", config, {})
    assert read_resolved(tmp_path)["recipe"] == "m-style-24gb"
    assert "recipe" not in as_flags(config)
