"""A family's recipes are read from its files, or what is wrong in them is named."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.cli.main import main
from dstrain.plugin import ModelFamily
from dstrain.registry import load_family
from dstrain_planner.recipes.record import Recipe, named, recipes_of

GOALS = """
[sources.paper]
title = "A paper"
url = "https://example.org/paper"

[sources.other]
title = "Another"
url = "https://example.org/other"

[style]
goal = "style"
title = "a style"
data = "images"

[style.options]
variant = { value = "base" }
model_id = { value = "A/B" }
learning_rate = { value = 1e-4, source = "paper" }
num_epochs = { value = 2, source = "untested", why = "It is short." }
tokenizer_path = { value = "here", source = "other" }
trigger_word = { value = 'a "dog" \\ é', source = "other" }
preview_prompt = { value = ["1", "b"], source = "other" }
resolution = { value = "512", source = "other" }
tiled = { value = true, source = "other", why = "It fits." }

[style.on.24GB]
num_epochs = { value = 5, source = "paper" }
lora_rank = { value = 8, source = "paper" }

[motion]
like = "style"
goal = "motion"
on = {}

[motion.options]
learning_rate = { value = 2e-4, source = "untested" }
"""
CARDS = """
[style.24GB]
options = { quant_options = "dit:int8_block", use_gradient_checkpointing = true, blocks_to_swap = 15 }
peaks = ["3.00 GiB", "20.00 GiB"]
ram = "1.00 GiB"

[style.16GB]
options = {}
peaks = ["3.00 GiB", "10.00 GiB"]

[motion.24GB]
options = {}
peaks = ["3.00 GiB", "22.00 GiB"]

[motion.80GB]
options = {}
peaks = ["3.00 GiB", "70.00 GiB"]
"""
Family = Callable[..., ModelFamily]


@pytest.fixture
def family(
    fake_plugin: Callable[..., Path], family_source: Callable[..., str]
) -> Family:
    """Return family(goals, cards): the installed one with these files."""
    source = family_source("my_family", recipes="'recipes_of_tests:ready'")
    modules = {"my_family_record": source}
    entries = {"my_family": "my_family_record:MODEL"}
    package = fake_plugin("plugin-my-family", entries, modules) / "recipes_of_tests"
    (package / "ready").mkdir(parents=True)
    (package / "__init__.py").touch()

    def make(goals: str = GOALS, cards: str = CARDS) -> ModelFamily:
        (package / "ready/goals.toml").write_text(goals)
        (package / "ready/cards.toml").write_text(cards)
        return load_family("my_family")

    return make


@pytest.fixture
def recipes(family: Family) -> dict[str, Recipe]:
    """The recipes of that family by the end of their names."""
    found = recipes_of(family())
    assert all(one.name.startswith("my-family-") for one in found)
    return {one.name.removeprefix("my-family-"): one for one in found}


def test_each_goal_has_a_recipe_for_each_card_the_smallest_first(
    recipes: dict[str, Recipe],
) -> None:
    assert {name: one.goal for name, one in recipes.items()} == {
        "style-16gb": "style",
        "style-24gb": "style",
        "motion-24gb": "motion",
        "motion-80gb": "motion",
    }
    assert recipes["style-24gb"].peaks == ("3.00 GiB", "20.00 GiB")
    assert [one.ram for one in recipes.values()] == ["", "1.00 GiB", "", ""]


def test_a_card_changes_options_and_adds_those_about_memory(
    recipes: dict[str, Recipe],
) -> None:
    small, large = recipes["style-16gb"], recipes["style-24gb"]
    assert small.options == {
        "variant": "base",
        "model_id": "A/B",
        "learning_rate": 1e-4,
        "num_epochs": 2,
        "tokenizer_path": "here",
        "trigger_word": 'a "dog" \\ é',
        "preview_prompt": ["1", "b"],
        "resolution": "512",
        "tiled": True,
        "feature_cache": "dstrain-cache",
    }
    more = {"num_epochs": 5, "lora_rank": 8, "quant_options": "dit:int8_block"}
    memory = {"use_gradient_checkpointing": True, "blocks_to_swap": 15}
    assert [*large.options.items()] == [*(small.options | more | memory).items()]
    sources = {one.option: one.source for one in large.settings}
    assert sources["num_epochs"] == "paper"
    assert sources["quant_options"] == "computed"
    typed = {"use_gradient_checkpointing": "true", "blocks_to_swap": "15"}
    assert {name: large.texts()[name] for name in typed} == typed


def test_a_goal_has_from_the_one_that_it_is_like_what_it_does_not_say(
    recipes: dict[str, Recipe],
) -> None:
    motion = recipes["motion-24gb"]
    assert motion.title == "a style"
    assert motion.options == {**recipes["style-16gb"].options, "learning_rate": 2e-4}
    # A recipe names only the sources of its own values.
    assert [*recipes["style-24gb"].sources] == ["paper", "other"]
    assert [*motion.sources] == ["other"]


def test_a_name_is_found_as_it_is_typed_and_the_nearest_is_named(
    recipes: dict[str, Recipe],
) -> None:
    every = recipes.values()
    assert named("My_Family-STYLE-16gb", every) == recipes["style-16gb"]
    with pytest.raises(UsageError, match=r"--recipe: .*'my-family-style-16gb'"):
        named("my-family-stile-16gb", every)
    with pytest.raises(UsageError, match="my-family-style-16gb, my-family-style-24gb"):
        named("my_family-style", every)


def test_a_recipe_is_shown_as_a_file_in_which_values_without_a_source_are_marked(
    recipes: dict[str, Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    for card in ("16gb", "24gb"):
        assert main(["recipes", "show", f"my-family-style-{card}"]) == 0
        text = capsys.readouterr().out
        options = recipes[f"style-{card}"].options
        assert tomllib.loads(text) == {"model": "my_family", **options}
        lines = text.splitlines()
        epochs = lines[lines.index(f"num_epochs = {options['num_epochs']}") - 1]
        assert epochs.endswith("[untested]" if card == "16gb" else "[1]")
    # What was computed for a card stands together.
    assert text.index("# ---- memory") < text.index("\nquant_options = ")


WRONG: dict[tuple[str, str], str] = {
    ("num_epochs", "num_epoch"): r"goals.toml: \[style\] num_epoch: .*'num_epochs'",
    (', source = "paper" }\nnum', " }\nnum"): r"\[style\] learning_rate",
    ('5, source = "paper"', "5"): r"\[style\] num_epochs",
    ("lora_rank", "lora_rnk"): r"goals.toml: \[style\] lora_rnk: .*'lora_rank'",
    ('source = "other"', 'source = "others"'): r"\[style\] tokenizer_path",
    ('like = "style"', 'like = "stile"'): r"\[motion\] .*'stile', .*'style'",
    ('{ value = "base" }', "{}"): r"\[style\]: .*value",
    ("data =", "dataset ="): r"\[style\]: .*dataset",
    (GOALS, "style = 1"): "goals.toml: ",
    (GOALS, "style"): "goals.toml: ",
    ("[motion.24", "[motions.24"): r"cards.toml: \[motions\] .*'motion'",
    ('["3.00 GiB", "10.00 GiB"]', '["3.00 GiB"]'): r"cards.toml: \[style.16GB\]",
    ("quant_options", "quant_option"): r"cards.toml: \[style\] quant_option: ",
}
"""What stands in a file, and what instead -> the place of the error, and what it names."""


@pytest.mark.parametrize("change", WRONG, ids=lambda change: ascii(change[1])[:30])
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    change: tuple[str, str], family: Family
) -> None:
    files = [text.replace(*change) for text in (GOALS, CARDS)]
    with pytest.raises(UsageError, match=WRONG[change]) as error:
        recipes_of(family(*files))
    assert error.value.where == "plugin my_family"


def test_a_family_may_have_none_and_a_folder_that_is_not_there_is_named(
    family: Family,
) -> None:
    record = family()
    assert recipes_of(replace(record, recipes="")) == []
    for place in ("recipes_of_tests:none", "no_such_package:ready"):
        with pytest.raises(UsageError, match=r"my_family: .*goals\.toml: "):
            recipes_of(replace(record, recipes=place))
