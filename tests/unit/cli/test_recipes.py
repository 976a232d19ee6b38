"""`dstrain recipes` lists and shows; `--recipe` gives options that a file and the command
line take precedence over.
"""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.cli.recipes import as_toml, find_recipe
from dstrain.config import as_flags
from dstrain.registry import load_family
from PIL import Image

PLACES = ("--dataset_base_path", "photos", "--output_path", "out")
NAME = "wan-character-24gb"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_recipe_tells_the_family_and_gives_options(runs: list[TrainConfig]) -> None:
    assert main(["train", "--recipe", NAME, *PLACES]) == 0
    assert main(["--recipe", "WAN_character-24gb", *PLACES]) == 0
    for config in runs:
        assert config.model == "wan"
        assert config.model_id == "Wan-AI/Wan2.1-T2V-14B"
        assert config.variant == "t2v"
        assert config.num_frames == 1
        assert config.max_steps == 2000
        assert config.quant_options == find_recipe(NAME).options["quant_options"]
        assert config.feature_cache == Path("dstrain-cache")
        assert config.recipe == NAME


def test_a_file_takes_precedence_over_a_recipe_and_the_command_line_over_both(
    runs: list[TrainConfig],
) -> None:
    Path("mine.toml").write_text("lora_rank = 4\nlearning_rate = 2e-4\n")
    given = ("--recipe", NAME, "--config", "mine.toml", "--learning_rate", "3e-4")
    assert main([*given, *PLACES]) == 0
    assert runs[0].lora_rank == 4
    assert runs[0].learning_rate == 3e-4
    assert runs[0].max_steps == 2000


def test_a_file_may_name_the_recipe(runs: list[TrainConfig]) -> None:
    Path("mine.toml").write_text(f"recipe = '{NAME}'\nmax_steps = 7\n")
    assert main(["--config", "mine.toml", *PLACES]) == 0
    assert (runs[0].recipe, runs[0].max_steps) == (NAME, 7)
    assert runs[0].model == "wan"


def test_a_toy_has_the_recipes_variant_and_none_of_its_files(
    runs: list[TrainConfig],
) -> None:
    assert main(["--recipe", "flux-edit-24gb", "--toy", *PLACES]) == 0
    for name, text in (("toy.toml", "toy = true\n"), ("toy.yaml", "toy: Yes\n")):
        Path(name).write_text(text)
        assert main(["--recipe", "flux-edit-24gb", "--config", name, *PLACES]) == 0
    assert len(runs) == 3
    for config in runs:
        assert config.toy
        assert config.model_id is None
        assert config.variant == "kontext"


def test_the_file_of_a_recipe_can_be_tried_with_a_toy(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "qwen-image-edit-2509-12gb"
    assert main(["recipes", "show", name]) == 0
    text = capsys.readouterr().out
    Path("rec.toml").write_text(text)
    Path("id.toml").write_text(f"model_id = '{find_recipe(name).options['model_id']}'")
    assert "add --toy" in text.replace("\n# ", " ")
    assert main(["--recipe", name, "--toy", *PLACES]) == 0
    capsys.readouterr()
    assert main(["--config", "rec.toml", "--toy", *PLACES]) == 0
    said = capsys.readouterr().err
    assert "--toy replaces model_id of rec.toml with a tiny model\n" in said
    assert "--toy has few blocks: blocks_to_swap of rec.toml is 1, not " in said
    by_name, by_file = runs
    assert (by_file.model_id, by_file.blocks_to_swap) == (None, 1)
    assert as_flags(by_file) == as_flags(by_name)
    assert main(["--config", "id.toml", "--toy", *PLACES]) == 0
    assert (runs[2].model, runs[2].variant) == ("qwen_image", by_name.variant)


def test_a_model_that_is_typed_replaces_the_toy_of_a_file(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("toy.toml").write_text("toy = true\nblocks_to_swap = 9\nhub = 'modelscope'\n")
    given = ("--config", "toy.toml", "--model", "faky", *PLACES)
    assert main([*given, "--model_id", "folder"]) == 0
    assert (runs[0].toy, runs[0].model_id) == (False, "folder")
    assert (runs[0].blocks_to_swap, runs[0].hub) == (9, "modelscope")
    assert "--model_id replaces toy of toy.toml\n" in capsys.readouterr().err
    Path("toy.toml").write_text("toy = false\n")
    assert main([*given, "--model_id", "folder"]) == 0
    assert "replaces" not in capsys.readouterr().err


def test_the_way_out_of_a_file_with_a_toy_and_a_model_works_as_it_is_typed(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("both.toml").write_text("model = 'faky'\ntoy = true\nmodel_id = 'folder'\n")
    assert main(["--config", "both.toml", *PLACES]) == 2
    said = capsys.readouterr().err
    assert "both.toml:toy: builds a small model" in said
    assert "--model faky --toy is a toy of that family" in said
    assert main(["--config", "both.toml", *PLACES, "--model", "faky", "--toy"]) == 0
    assert (runs[0].toy, runs[0].model_id) == (True, None)
    assert (
        main(["--config", "both.toml", *PLACES, "--toy", "--model_id", "folder"]) == 2
    )
    assert "--toy: builds a small model" in capsys.readouterr().err


def test_a_written_configuration_repeats_the_run_without_the_recipe(
    runs: list[TrainConfig],
) -> None:
    assert main(["--recipe", NAME, *PLACES, "--lora_rank", "4"]) == 0
    written = {**as_flags(runs[0]), "versions": {}, "recipe": "one-that-is-gone"}
    Path("config.json").write_text(json.dumps(written, default=str))
    assert main(["--config", "config.json"]) == 0
    assert as_flags(runs[1]) == as_flags(runs[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--recipe", "wan-caracter-24gb"),
            "--recipe: no recipe named 'wan-caracter-24gb'; did you mean 'wan-character-24gb'?",
        ),
        (("--recipe", ""), "--recipe: no recipe named ''"),
        (
            ("--recipe", NAME, "--model", "flux"),
            "--model: is flux, but recipe wan-character-24gb is for wan",
        ),
        (
            ("--recipe", NAME, "--trainable_models", "vae,dit.blocks"),
            "--trainable_models: trains dit in full, but recipe wan-character-24gb is for LoRA on it",
        ),
        (
            ("recipes", "show", "qwen-image-stile-24gb"),
            "did you mean 'qwen-image-style-24gb'?",
        ),
        (("recipes", "Qwen"), "did you mean: dstrain recipes --model qwen_image\n"),
        (("recipes", "nothing"), "\n  `dstrain recipes` lists all; "),
        (("recipes", "--card", "big"), "--card: expected a size such as 24GB"),
        (
            ("recipes", "--model", "wan", "--card", "2GB"),
            "--card: no recipe fits on 2GB; the least card of any is ",
        ),
        (
            ("recipes", "--model", "flux", "--goal", "stile"),
            "--goal: no recipe of flux is for 'stile'; goals: character, edit, style; did you mean 'style'?",
        ),
        (
            ("recipes", "--model", "wan", "--goal", "edit"),
            "no recipe of wan is for 'edit'; goals: character, motion, style\n"
            "  other families: dstrain recipes --goal edit",
        ),
        (("recipes", "--family", "wan"), "no such option\n  use --model"),
        (("recipes", "--tokenizer_path"), "--tokenizer_path: no such option\n"),
        (("recipes", "show"), "needs the name of a recipe; `dstrain recipes` lists"),
        (("recipes", "show", "wan"), "recipes show: no recipe named 'wan'"),
        (
            ("recipes", "show", "wan-character-CARD"),
            "no recipe named 'wan-character-CARD'; it lacks its card: wan-character-",
        ),
        (
            ("recipes", "--card", "24GB", "show", NAME),
            "--card: has no effect here",
        ),
        (("recipes", "--json", "show", NAME), "--json: has no effect here"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = () if words[0] == "recipes" else PLACES
    assert main([*words, *places]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("wan", "recipes --model wan"),
        ("qwen-image", "recipes --model qwen_image"),
        ("stile", "recipes --goal style"),
        ("24GB", "recipes --card 24GB"),
        ("list", "recipes"),
        (NAME, f"recipes show {NAME}"),
        ("wan_caracter-24gb", f"recipes show {NAME}"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_one_that_works(
    word: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", word]) == 2
    advice = f"no command named {word!r}\n  did you mean: dstrain {command}\n"
    assert capsys.readouterr().err.endswith(advice)
    assert main(command.split()) == 0


def test_a_dataset_of_another_kind_is_answered_with_the_recipes_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("photos").mkdir()
    Image.new("RGB", (64, 64)).save("photos/a.png")
    Path("photos/a.txt").write_text("a dog")
    assert main(["--recipe", "flux-edit-24gb", "--toy", *PLACES]) == 2
    said = capsys.readouterr().err.splitlines()[-4:]
    assert "edit-24gb:extra_inputs: no column of photos gives input" in said[0]
    assert said[0].endswith(find_recipe("flux-edit-24gb").data)


def test_full_training_is_answered_with_the_command_that_does_it(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--recipe", NAME, *PLACES, "--trainable_models", "dit", "--seed", "7")
    assert main(given) == 2
    command = capsys.readouterr().err.partition("without the recipe: ")[2]
    assert main(shlex.split(command.splitlines()[0])[1:]) == 0
    config = runs[0]
    assert (config.trainable_models, config.lora_base_model) == ("dit", None)
    assert (config.quant_options, config.blocks_to_swap) == (None, None)
    assert (config.model_id, config.variant) == ("Wan-AI/Wan2.1-T2V-14B", "t2v")
    assert (config.num_frames, config.seed, config.max_steps) == (1, 7, 2000)
    assert (config.learning_rate, config.recipe) == (1e-5, "")


def test_a_file_of_another_command_has_no_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.toml").write_text(f"model = 'wan'\nrecipe = '{NAME}'\n")
    assert main(["generate", "--config", "mine.toml", "--output", "a.mp4"]) == 2
    assert "mine.toml:recipe: no such option" in capsys.readouterr().err


def test_the_list_has_every_family_and_goal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    cards = ["12gb", "16gb", "24gb", "48gb", "80gb"]
    assert ["flux-style-CARD", *cards] in lines
    assert ["wan-i2v-motion-CARD", *cards] in lines
    assert ["qwen-image-edit-2509-CARD", *cards] in lines
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("narrowed", [(), ("--goal", "motion"), ("--card", "48GB")])
def test_a_list_ends_with_commands_that_work(
    narrowed: tuple[str, ...],
    runs: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", *narrowed]) == 0
    said = capsys.readouterr().out.replace("\\\n", "")
    commands = [line.split() for line in said.splitlines() if "    dstrain" in line]
    assert ["dstrain", "recipes", "show"] in [command[:3] for command in commands]
    for command in commands:
        assert main(command[1:]) == 0
    (config,) = runs
    assert config.recipe in {command[-1] for command in commands}


def test_without_recipes_the_list_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    families = [f"no:{name}" for name in ("flux", "qwen_image", "wan")]
    disabled = [word for name in families for word in ("-p", name)]
    for narrowed in ([], ["--card", "24GB"]):
        assert main(["recipes", *narrowed, *disabled]) == 0
        assert capsys.readouterr().out == "no installed family has recipes\n"


def test_a_card_has_the_recipe_of_each_goal_that_makes_the_most_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "--model", "flux", "--card", "20GB"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["recipe", "peak", "weights", "in", "RAM"]
    names = [line.split()[0] for line in said[1 : said.index("")]]
    assert {"flux-style-16gb", "flux-character-16gb", "flux-edit-16gb"} <= {*names}
    assert all(name.endswith("-16gb") for name in names)
    assert len(names) == len({*names})


def test_json_has_options_sources_and_peaks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "show", NAME, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recipe = find_recipe(NAME)
    assert shown["options"] == recipe.options
    assert shown["peaks"] == [*recipe.peaks]
    assert shown["option_sources"]["learning_rate"] in shown["sources"]
    every = ["recipes", "--model", "wan", "--goal", "character", "--json"]
    assert main(every) == 0
    assert shown in json.loads(capsys.readouterr().out)


def test_what_is_shown_is_a_file_with_a_reason_above_each_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "show", NAME]) == 0
    said = capsys.readouterr().out
    recipe = find_recipe(NAME)
    assert tomllib.loads(said) == {"model": "wan", **recipe.options}
    lines = said.splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            above = lines[number - 1]
            assert above.startswith("# ")
            assert not above.startswith("# ----")
    for one in recipe.sources.values():
        assert f"#     {one.url}" in lines
    assert recipe.peaks[1] in said
    assert f"#     dstrain train --recipe {NAME} --max_steps 10 --toy \\" in lines
    assert '# output_path = "out"' in lines
    assert '# trigger_word = "ohwx"' in lines


def test_untested_values_are_marked() -> None:
    recipe = find_recipe(NAME)
    settings = tuple(
        type(one)(one.option, one.value, one.why, "untested")
        if one.option == "lora_rank"
        else one
        for one in recipe.settings
    )
    changed = type(recipe)(**{**vars(recipe), "settings": settings})
    lines = as_toml(changed, load_family("wan")).splitlines()
    assert lines[lines.index("lora_rank = 32") - 1].endswith("[untested]")


def test_a_plugin_whose_recipes_are_wrong_hides_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wan = load_family("wan")
    # A record is frozen.
    monkeypatch.setitem(vars(wan), "recipes", "dstrain_wan:none")
    assert main(["recipes"]) == 0
    said = capsys.readouterr()
    assert "flux-style-24gb" in said.out
    assert "plugin wan: its recipes, goals.toml: cannot be read" in said.err
