"""A family's recipes are read from its files, or what is wrong in them is named."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.plugin import ModelFamily
from dstrain.registry import named, recipes_of, select
from dstrain.registry.recipes import goals_of

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

[motion.80GB]
options = {}
peaks = ["3.00 GiB", "70.00 GiB"]
"""
Family = Callable[..., ModelFamily]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """Return family(goals, cards): the record of one with these files."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "recipes_of_tests"
    (package / "ready").mkdir(parents=True)
    (package / "__init__.py").touch()

    def make(goals: str = GOALS, cards: str = CARDS) -> ModelFamily:
        (package / "ready/goals.toml").write_text(goals)
        (package / "ready/cards.toml").write_text(cards)
        importlib.invalidate_caches()
        from dstrain.plugin import Option

        return ModelFamily(
            name="my_family",
            pipelines="",
            components="",
            toy="",
            variants=("base",),
            default_trainable="dit",
            lora_targets={},
            lora_prefixes={},
            options=(Option("tokenizer_path", "Its folder.", "tokenizer"),),
            recipes="recipes_of_tests:ready",
        )

    yield make
    sys.modules.pop("recipes_of_tests", None)


def test_each_goal_has_a_recipe_for_each_card_the_smallest_first(
    family: Family,
) -> None:
    found = recipes_of(family())
    assert [one.name for one in found] == [
        "my-family-style-16gb",
        "my-family-style-24gb",
        "my-family-motion-80gb",
    ]
    assert [one.goal for one in found] == ["style", "style", "motion"]
    assert found[1].peaks == ("3.00 GiB", "20.00 GiB")
    assert [one.ram for one in found] == ["", "1.00 GiB", ""]


def test_a_card_changes_options_and_adds_those_about_memory(family: Family) -> None:
    small, large, _ = recipes_of(family())
    assert small.options == {
        "variant": "base",
        "model_id": "A/B",
        "learning_rate": 1e-4,
        "num_epochs": 2,
        "tokenizer_path": "here",
        "feature_cache": "dstrain-cache",
    }
    more = {"num_epochs": 5, "lora_rank": 8, "quant_options": "dit:int8_block"}
    memory = {"use_gradient_checkpointing": True, "blocks_to_swap": 15}
    assert large.options == small.options | more | memory
    sources = {one.option: one.source for one in large.settings}
    assert sources["num_epochs"] == "paper"
    assert sources["quant_options"] == "computed"


def test_a_goal_has_from_the_one_that_it_is_like_what_it_does_not_say(
    family: Family,
) -> None:
    motion = recipes_of(family())[2]
    assert motion.title == "a style"
    assert motion.options["learning_rate"] == 2e-4
    assert motion.options["model_id"] == "A/B"
    assert goals_of(family())[1].on == {}


def test_a_recipe_names_only_the_sources_of_its_own_values(family: Family) -> None:
    style, _, motion = recipes_of(family())
    assert [*style.sources] == ["paper", "other"]
    assert [*motion.sources] == ["other"]


def test_values_are_typed_as_on_the_command_line(family: Family) -> None:
    large = recipes_of(family())[1]
    assert large.texts()["use_gradient_checkpointing"] == "true"
    assert large.texts()["model_id"] == "A/B"
    assert large.texts()["blocks_to_swap"] == "15"


def test_a_reason_is_the_recipes_own_or_what_the_option_does(family: Family) -> None:
    large = {one.option: one.reason for one in recipes_of(family())[1].settings}
    assert large["learning_rate"].startswith("How far a step goes")
    assert large["num_epochs"] == ""
    assert "half" in large["quant_options"]
    small = {one.option: one.reason for one in recipes_of(family())[0].settings}
    assert small["num_epochs"] == "It is short."


def test_a_selection_takes_the_most_of_a_card(family: Family) -> None:
    every = recipes_of(family())
    assert [one.name for one in select(every, card="40GB")] == ["my-family-style-24gb"]
    assert [one.name for one in select(every, card="80")] == [
        "my-family-style-24gb",
        "my-family-motion-80gb",
    ]
    assert [one.goal for one in select(every, goal="motion")] == ["motion"]
    assert select(every, card="12GB") == []
    with pytest.raises(UsageError, match="--card: expected a size"):
        select(every, card="big")


def test_a_name_is_found_as_it_is_typed_and_the_nearest_is_named(
    family: Family,
) -> None:
    every = recipes_of(family())
    assert named("My_Family-STYLE-16gb", every) == every[0]
    with pytest.raises(
        UsageError, match="no recipe named 'my-family-stile-16gb'"
    ) as error:
        named("my-family-stile-16gb", every)
    assert "did you mean 'my-family-style-16gb'?" in str(error.value)
    cards = "lacks its card: my-family-style-16gb, my-family-style-24gb"
    with pytest.raises(UsageError, match=cards):
        named("my_family-style", every)


def test_a_family_without_recipes_has_none(family: Family) -> None:
    record = family()
    object.__setattr__(record, "recipes", "")
    assert recipes_of(record) == goals_of(record) == []


WRONG = {
    "an unknown option": (
        GOALS.replace("num_epochs", "num_epoch"),
        CARDS,
        r"goals.toml: \[style\] num_epoch: no such option; did you mean 'num_epochs'",
    ),
    "no source": (
        GOALS.replace(', source = "paper" }\nnum', " }\nnum"),
        CARDS,
        r"\[style\] learning_rate has no source",
    ),
    "a source that is not there": (
        GOALS.replace('source = "other"', 'source = "others"'),
        CARDS,
        r"\[style\] tokenizer_path has no source",
    ),
    "like what is not above": (
        GOALS.replace('like = "style"', 'like = "stile"'),
        CARDS,
        r"\[motion\] is like 'stile', which is not above it; did you mean 'style'",
    ),
    "no value": (
        GOALS.replace('{ value = "base" }', "{}"),
        CARDS,
        r"\[style\]: .*value",
    ),
    "an unknown field": (
        GOALS.replace("data =", "dataset ="),
        CARDS,
        r"\[style\]: .*dataset",
    ),
    "no table": ("style = 1", CARDS, "goals.toml: expected a table"),
    "no TOML": ("style", CARDS, "goals.toml: cannot be read"),
    "a goal that is not there": (
        GOALS,
        CARDS.replace("[motion.", "[motions."),
        r"cards.toml: \[motions\] is no goal of goals.toml; did you mean 'motion'",
    ),
    "one peak": (
        GOALS,
        CARDS.replace('["3.00 GiB", "10.00 GiB"]', '["3.00 GiB"]'),
        r"cards.toml: \[style.16GB\] lacks options or two peaks",
    ),
    "an unknown flag of a card": (
        GOALS,
        CARDS.replace("quant_options", "quant_option"),
        r"cards.toml: \[style\] quant_option: no such option",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    name: str, family: Family
) -> None:
    goals, cards, words = WRONG[name]
    with pytest.raises(UsageError, match=words) as error:
        recipes_of(family(goals, cards))
    assert str(error.value).startswith("dstrain: error: plugin my_family: its recipes")


def test_a_folder_that_is_not_there_is_named(family: Family) -> None:
    record = family()
    for place in ("recipes_of_tests:none", "no_such_package:ready"):
        object.__setattr__(record, "recipes", place)
        with pytest.raises(UsageError, match=r"goals\.toml: cannot be read"):
            recipes_of(record)
