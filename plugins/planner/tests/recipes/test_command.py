"""`dstrain recipes` lists and shows; `--recipe` gives options that a file and the command
line take precedence over.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig, installed
from dstrain.cli.main import main
from dstrain.config import as_flags
from dstrain.registry import load_family
from dstrain_planner.recipes.record import named, recipes_of
from PIL import Image

Printed = pytest.CaptureFixture[str]
PLACES = ("--dataset_base_path", "photos", "--output_path", "out")
NAME = "wan-character-24gb"
RECIPE = named(NAME, recipes_of(load_family("wan")))
EDIT = "qwen-image-edit-2509-12gb"


pytestmark = pytest.mark.usefixtures("empty")


def train(words: str) -> int:
    return main([*words.split(), *PLACES])


@pytest.fixture
def shown(capsys: Printed) -> Callable[[str], str]:
    """Words after `dstrain recipes` -> what it prints."""

    def run(words: str) -> str:
        assert main(["recipes", *words.split()]) == 0
        return capsys.readouterr().out

    return run


def test_a_recipe_tells_the_family_and_gives_options(runs: list[TrainConfig]) -> None:
    assert train(f"train --recipe {NAME}") == 0
    assert train("--recipe WAN_character-24gb") == 0
    for config in runs:
        assert config.model == "wan"
        assert config.model_id == "Wan-AI/Wan2.1-T2V-14B"
        assert config.variant == "t2v"
        assert config.num_frames == 1
        assert config.max_steps == 2000
        assert config.quant_options == RECIPE.options["quant_options"]
        assert config.feature_cache == Path("dstrain-cache")
        assert config.recipe == NAME


def test_a_file_takes_precedence_over_a_recipe_and_the_command_line_over_both(
    runs: list[TrainConfig],
) -> None:
    Path("mine.toml").write_text("lora_rank = 4\nlearning_rate = 2e-4\n")
    assert train(f"--recipe {NAME} --config mine.toml --learning_rate 3e-4") == 0
    assert (runs[0].lora_rank, runs[0].learning_rate) == (4, 3e-4)
    assert runs[0].max_steps == 2000


def test_a_toy_has_the_recipes_variant_and_none_of_its_files(
    runs: list[TrainConfig],
) -> None:
    Path("toy.toml").write_text("toy = true\n")
    Path("toy.yaml").write_text("toy: Yes\n")
    for toy in ("--toy", "--config toy.toml", "--config toy.yaml"):
        assert train(f"--recipe flux-edit-24gb {toy}") == 0
    assert [config.toy for config in runs] == [True] * 3
    assert {config.model_id for config in runs} == {None}
    assert {config.variant for config in runs} == {"kontext"}


def test_the_file_of_a_recipe_can_be_tried_with_a_toy(
    runs: list[TrainConfig], shown: Callable[[str], str], capsys: Printed
) -> None:
    text = shown(f"show {EDIT}")
    Path("rec.toml").write_text(text)
    Path("id.toml").write_text(f"model_id = '{tomllib.loads(text)['model_id']}@v1'")
    assert "--toy" in text
    assert train(f"--recipe {EDIT} --toy") == 0
    capsys.readouterr()
    assert train("--config rec.toml --toy") == 0
    said = capsys.readouterr().err
    assert re.search("model_id,.* blocks_to_swap of rec.toml", said)
    by_name, by_file = runs
    assert (by_file.model_id, by_file.blocks_to_swap) == (None, 1)
    assert as_flags(by_file) == as_flags(by_name)
    assert train("--config id.toml --toy") == 0
    assert (runs[2].model, runs[2].variant) == ("qwen_image", by_name.variant)


def test_a_model_that_is_typed_replaces_the_toy_of_a_file(
    runs: list[TrainConfig], capsys: Printed
) -> None:
    Path("toy.toml").write_text("toy = true\nblocks_to_swap = 9\nhub = 'modelscope'\n")
    Path("real.toml").write_text("toy = false\n")
    for file in ("toy.toml", "real.toml"):
        assert train(f"--config {file} --model faky --model_id folder") == 0
        is_said = "--model_id replaces toy of toy.toml" in capsys.readouterr().err
        assert is_said == (file == "toy.toml")
    assert (runs[0].toy, runs[0].model_id) == (False, "folder")
    assert (runs[0].blocks_to_swap, runs[0].hub) == (9, "modelscope")


def test_the_way_out_of_a_file_with_a_toy_and_a_model_works_as_it_is_typed(
    runs: list[TrainConfig], capsys: Printed
) -> None:
    Path("both.toml").write_text("model = 'faky'\ntoy = true\nmodel_id = 'folder'\n")
    assert train("--config both.toml") == 2
    said = capsys.readouterr().err
    assert "both.toml:toy: " in said
    assert train("--config both.toml --model faky --toy") == 0
    assert (runs[0].toy, runs[0].model_id) == (True, None)
    assert train("--config both.toml --toy --model_id folder") == 2
    assert "error: --toy: " in capsys.readouterr().err


REFUSED = {
    "--recipe wan-caracter-24gb": f"--recipe: '{NAME}'",
    "--recipe=": "--recipe: ''",
    f"--recipe {NAME} --model flux": f"--model: flux {NAME} wan",
    "recipes show qwen-image-stile-24gb": "recipes show: 'qwen-image-style-24gb'",
    "recipes nothing": "recipes: `dstrain recipes`",
    "recipes --card big": "--card: 24GB",
    "recipes --model wan --card 2GB": "--card: 2GB 12GB",
    "recipes --model flux --goal stile": "--goal: 'stile' character, edit, 'style'",
    "recipes --model wan --goal edit": "--goal: motion, --goal edit",
    "recipes --family wan": "--family: --model",
    "recipes --tokenizer_path": "--tokenizer_path:",
    "recipes show": "recipes show: `dstrain recipes`",
    "recipes show wan": "recipes show: 'wan'",
    "recipes show wan-character-CARD": f"recipes show: {NAME}",
    f"recipes --card 24GB show {NAME}": "--card:",
    f"recipes --model wan show {NAME}": "--model:",
    f"recipes --goal motion show {NAME}": "--goal:",
    f"recipes --json show {NAME}": "--json:",
}
"""A command -> the place of the error, then what it must name."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_names_what_there_is(words: str, capsys: Printed) -> None:
    assert (main(words.split()) if words.startswith("recipes") else train(words)) == 2
    said = capsys.readouterr().err
    place, _, named = REFUSED[words].partition(":")
    assert said.startswith(f"dstrain: error: {place}: ")
    assert [word for word in named.split() if word not in said] == []


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("wan", "recipes --model wan"),
        ("qwen-image", "recipes --model qwen_image"),
        ("Qwen", "recipes --model qwen_image"),
        ("stile", "recipes --goal style"),
        ("24GB", "recipes --card 24GB"),
        ("list", "recipes"),
        (NAME, f"recipes show {NAME}"),
        ("wan_caracter-24gb", f"recipes show {NAME}"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_one_that_works(
    word: str, command: str, capsys: Printed
) -> None:
    assert main(["recipes", word]) == 2
    said = capsys.readouterr().err
    assert repr(word) in said
    assert said.endswith(f": dstrain {command}\n")
    assert main(command.split()) == 0


def test_a_dataset_of_another_kind_is_answered_with_the_recipes_own(
    capsys: Printed, shown: Callable[[str], str]
) -> None:
    wanted = json.loads(shown("show flux-edit-24gb --json"))["data"]
    Path("photos").mkdir()
    Image.new("RGB", (64, 64)).save("photos/a.png")
    Path("photos/a.txt").write_text("a dog")
    assert train("--recipe flux-edit-24gb --toy") == 2
    said = capsys.readouterr().err.splitlines()[-4:]
    assert "edit-24gb:extra_inputs: " in said[0]
    assert said[0].endswith(wanted)


def test_full_training_is_answered_with_the_command_that_does_it(
    runs: list[TrainConfig], capsys: Printed
) -> None:
    own = "--tokenizer_path here -p no:tools"
    assert train(f"--recipe {NAME} --trainable_models dit,vae --seed 7 {own}") == 2
    error, line, *_ = capsys.readouterr().err.splitlines()
    assert error.startswith("dstrain: error: --trainable_models: ")
    assert NAME in error
    assert main(shlex.split(line[line.index("dstrain ") :])[1:]) == 0
    config = runs[0]
    assert (config.trainable_models, config.lora_base_model) == ("dit,vae", None)
    assert (config.quant_options, config.blocks_to_swap) == (None, None)
    assert (config.model_id, config.variant) == ("Wan-AI/Wan2.1-T2V-14B", "t2v")
    assert (config.num_frames, config.seed, config.max_steps) == (1, 7, 2000)
    assert config.family_options == {"tokenizer_path": "here"}
    assert config.disabled_plugins == ("tools",)
    assert (config.learning_rate, config.recipe) == (1e-5, None)
    assert train(f"--recipe {NAME} --trainable_models dit --learning_rate 3e-5") == 2
    assert "--learning_rate 3e-05" in capsys.readouterr().err


@pytest.mark.parametrize("narrowed", ["", "--goal motion", "--card 48GB"])
def test_a_list_ends_with_commands_that_work(
    narrowed: str, runs: list[TrainConfig], shown: Callable[[str], str]
) -> None:
    lines = shown(narrowed).replace("\\\n", "").splitlines()
    commands = [line.split() for line in lines if "    dstrain" in line]
    assert ["dstrain", "recipes", "show"] in [command[:3] for command in commands]
    for command in commands:
        assert main(command[1:]) == 0
    (config,) = runs
    assert config.recipe in {command[-1] for command in commands}
    assert config.recipe.endswith("-48gb" if "48GB" in narrowed else "-24gb")


def test_a_card_has_the_recipe_of_each_goal_that_makes_the_most_of_it(
    shown: Callable[[str], str],
) -> None:
    said = shown("--model flux --card 20GB").splitlines()
    rows = [line.split() for line in said[1 : said.index("")]]
    names = [row[0] for row in rows]
    every = {one.name: one for one in recipes_of(load_family("flux"))}
    for name, peak, *_ in rows:
        assert float(peak) == max(float(one.split()[0]) for one in every[name].peaks)
    assert {"flux-style-16gb", "flux-character-16gb", "flux-edit-16gb"} <= {*names}
    assert all(name.endswith("-16gb") for name in names)
    assert len(names) == len({*names})


def test_json_has_options_sources_and_peaks(shown: Callable[[str], str]) -> None:
    found: dict[str, Any] = json.loads(shown(f"show {NAME} --json"))
    assert found["options"] == RECIPE.options
    assert found["peaks"] == [*RECIPE.peaks]
    assert found["option_sources"]["learning_rate"] in found["sources"]
    assert all(found["option_sources"].values())
    every = json.loads(shown("--model wan --goal character --json"))
    assert found in every
    assert {one["goal"] for one in every} == {"character"}


def test_what_is_shown_is_a_file_with_a_reason_above_each_line(
    shown: Callable[[str], str],
) -> None:
    said = shown(f"show {NAME}")
    assert tomllib.loads(said) == {"model": "wan", **RECIPE.options}
    lines = said.splitlines()
    for above, line in pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("# ")
            assert not above.startswith("# ----")
    for one in RECIPE.sources.values():
        assert f"#     {one.url}" in lines
    assert said.index(RECIPE.peaks[0]) < said.index(RECIPE.peaks[1])
    for example in ('output_path = "out"', 'trigger_word = "ohwx"'):
        assert f"# {example}" in lines


def test_a_plugin_whose_recipes_are_wrong_hides_no_others(
    fake_plugin: Callable[..., Path], family_source: Callable[..., str], capsys: Printed
) -> None:
    modules = {"bad_record": family_source("bad", recipes="'bad_record:none'")}
    fake_plugin("plugin-bad", {"bad": "bad_record:MODEL"}, modules)
    assert main(["recipes"]) == 0
    said = capsys.readouterr()
    assert "flux-style-24gb" in said.out
    assert "plugin bad: " in said.err and "goals.toml" in said.err


@pytest.mark.parametrize(
    ("plugin", "option"), [("watch", "preview_prompt"), ("memory", "quant_options")]
)
def test_a_recipe_with_an_option_of_an_absent_plugin_is_shown_and_its_runs_refused(
    plugin: str,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    shown: Callable[[str], str],
    capsys: Printed,
) -> None:
    every, name = installed._found_in, "qwen-image-style-24gb"

    def others(*asked: Any) -> tuple[installed.Installed, ...]:
        return tuple(one for one in every(*asked) if plugin not in one.distribution)

    monkeypatch.setattr("dstrain.installed._found_in", others)
    assert "qwen-image-style-CARD" in shown("")
    assert option in tomllib.loads(shown(f"show {name}"))
    for more in ("", "--toy --lora_rank 4"):
        assert train(f"--recipe {name} {more}") == 2
        said = capsys.readouterr().err
        assert said.startswith(f"dstrain: error: recipe {name}:{option}: ")
        assert f"./plugins/{plugin}\n" in said
