"""Each recipe of every family runs at toy sizes, fits on its card with the peak that
it states, and is read back from what `dstrain recipes show` prints.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.registry import load_family, usable_families
from dstrain.runs.resolve import resolve
from dstrain.storage import tensor_shapes
from dstrain.testing.rows import usual_size, write_rows
from dstrain_planner.recipes.record import Recipe, card_size, goals_of, recipes_of

from benchmarks.gpu.recipes import (
    FAMILIES,
    SIZES,
    computed,
    main as compute,
    page,
    place,
    table,
)
from tests.support import ROOT, everyday
from tests.support.processes import words

RECIPES = {
    recipe.name: recipe for name in FAMILIES for recipe in recipes_of(load_family(name))
}
EVERYDAY = ("flux-edit-12gb", "qwen-image-character-16gb", "wan-i2v-motion-24gb")
"""Three, which together have 4 and 8 bits, swapped blocks, buckets and videos; the others are
left to `make everything`."""
GOALS = {
    f"{name}-{goal.key}": goal
    for name in FAMILIES
    for goal in goals_of(load_family(name))
}


def test_every_goal_fits_on_a_card_of_24_gb_and_on_larger_ones() -> None:
    for goal in GOALS.values():
        cards = {
            one.card
            for one in RECIPES.values()
            if (one.family, one.title) == (goal.family, goal.title)
        }
        assert {"24GB", "48GB", "80GB"} <= cards <= {*SIZES}, goal.key


def test_recipes_are_of_what_their_family_has() -> None:
    """Recipes name variants, models and components that exist."""
    families, _ = usable_families()
    for family in families:
        for recipe in recipes_of(family):
            options = recipe.options
            trained = options.get("lora_base_model", family.default_trainable)
            assert options.get("variant", family.variants[0]) in family.variants
            assert trained in family.lora_targets
            assert "model_id" not in options or family.knows(options["model_id"])


def test_the_page_has_the_table_that_the_files_make() -> None:
    page = (ROOT / "docs/guide/recipes.md").read_text()
    assert "\n".join(table()) in page, (
        "run: python -m benchmarks.gpu.recipes table, and put it into the page"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_goals_that_are_not_computed_again_stay_as_they_are(name: str) -> None:
    family = load_family(name)
    assert page(family, ["another-family-style"]) == place(family).read_text()


def test_an_unknown_goal_is_refused_before_any_is_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compute(["wan-style", "wan-stile"]) == 2
    said = capsys.readouterr().err
    assert said == "no goal 'wan-stile'; did you mean 'wan-style'?\n"


@pytest.mark.parametrize("name", everyday.cases(RECIPES, lambda name: "24gb" in name))
def test_a_recipe_is_read_back_from_what_is_shown(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "dstrain_planner.recipes.command.find_recipe", lambda *_: RECIPES[name]
    )
    assert main(["recipes", "show", name]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    given: list[TrainConfig] = []
    monkeypatch.setattr("dstrain.runs.runner.start", given.append)
    places = ["--dataset_base_path", "photos", "--output_path", "out"]
    assert main(["train", "--config", str(shown), *places]) == 0
    assert main(["train", "--recipe", name, *places]) == 0
    from_file, from_recipe = given
    assert from_recipe == replace(from_file, recipe=name) != from_file


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("name", everyday.cases(RECIPES, EVERYDAY.__contains__))
def test_a_recipe_runs_at_toy_sizes(name: str) -> None:
    recipe = RECIPES[name]
    given = {**toy_flags(recipe), "max_steps": 2, "output_path": "out"}
    assert main(["train", *words({"recipe": name, "toy": True, **given})]) == 0
    (weights,) = Path("out").glob("*.safetensors")
    assert tensor_shapes(weights)
    recorded = json.loads(Path("out/logs/config.json").read_text())
    assert recorded["recipe"] == name
    for option, value in recipe.options.items():
        if option == "blocks_to_swap":
            assert recorded[option] == 1
        elif option not in given and option != "model_id":
            assert recorded[option] == value, option


def toy_flags(recipe: Recipe) -> dict[str, Any]:
    """A dataset of the variant, and what of a recipe is too large for a toy."""
    options = recipe.options
    family = load_family(recipe.family)
    spec = resolve(
        TrainConfig(model=family.name, variant=options["variant"], toy=True)
    ).spec
    data = write_rows(spec, Path("data"))
    flags: dict[str, Any] = {"dataset_base_path": data, "dataset_repeat": 1}
    if "resolution" in options:
        flags["resolution"] = "64"
        flags["bucket_upscale"] = True
    if options.get("num_frames", 1) > 1:
        flags["num_frames"] = usual_size(spec).frames
    return flags


@pytest.mark.drawn
@pytest.mark.parametrize("name", GOALS)
def test_peaks_and_flags_are_what_is_computed_and_fit_on_the_card(name: str) -> None:
    goal = GOALS[name]
    found = computed(goal)
    for card in SIZES:
        recipe = RECIPES.get(f"{name.replace('_', '-')}-{card.lower()}")
        if card not in found:
            assert recipe is None, f"nothing fits on {card}"
            continue
        assert recipe is not None, f"{card} is left out"
        assert recipe == goal.recipe(card, found[card])
        assert max(gib(peak) for peak in recipe.peaks) <= card_size(card) / 2**30


def gib(size: str) -> float:
    number, unit = size.split()
    assert unit == "GiB"
    return float(number)
