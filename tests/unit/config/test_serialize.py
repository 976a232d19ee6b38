"""A configuration is written as data, without secrets and without options of one start."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.config import (
    CONFIG as PLACE,
    LoraFile,
    NamedInput,
    as_flags,
    command_line,
    flags,
    read_resolved,
    with_run_options,
    write_resolved,
)
from dstrain.config.options import options_affecting
from dstrain.config.serialize import assignment, continued, refill_advice

from tests.support.command_lines import toy_config

CONFIG = TrainConfig(
    model="faky",
    toy=True,
    dataset_base_path=Path("data"),
    output_path=Path("out"),
    preview_prompt=("a dog", "a cat"),
    resume="auto",
    family_options={"area": "64"},
    disabled_plugins=("plugin-other",),
)


def test_every_option_is_written_by_its_name() -> None:
    written = as_flags(CONFIG)
    own = {flag.name for flag in flags(TrainConfig)}
    assert set(written) == own | {"area", "p"}
    assert written["dataset_base_path"] == "data"
    assert written["preview_prompt"] == ["a dog", "a cat"]
    assert (written["area"], written["p"]) == ("64", ["no:plugin-other"])
    assert written["variant"] is None


def test_files_and_inputs_are_written_as_on_the_command_line() -> None:
    config = GenerateConfig(
        model="faky",
        output=Path("x.png"),
        lora=(LoraFile(Path("a.s"), 0.5),),
        input=(NamedInput("edit_image", "a.png"),),
    )
    written = as_flags(config)
    assert (written["lora"], written["input"]) == (["a.s:0.5"], ["edit_image=a.png"])


def test_the_name_of_a_recipe_is_written_and_no_option_of_generation(
    tmp_path: Path,
) -> None:
    config = TrainConfig(model="m", toy=True, recipe="m-style-24gb")
    assert "recipe" not in as_flags(TrainConfig(model="m"))
    (tmp_path / PLACE).parent.mkdir()
    write_resolved(tmp_path / PLACE, config, {})
    assert read_resolved(tmp_path)["recipe"] == "m-style-24gb"
    wanted = GenerateConfig(model="m", run=tmp_path, prompt="a", output=Path("a.png"))
    assert with_run_options(wanted).family_options == {}


def test_options_of_one_start_are_not_in_the_file(tmp_path: Path) -> None:
    write_resolved(tmp_path / "a.json", CONFIG, {"torch": "2"})
    text = (tmp_path / "a.json").read_text()
    written = json.loads(text)
    assert set(as_flags(CONFIG)) - set(written) == set(options_affecting("start"))
    assert written["versions"] == {"torch": "2"}
    assert list(written) == sorted(written) and text.endswith("\n")


def test_secrets_are_not_written(tmp_path: Path) -> None:
    path = "https://user:password1@host/x"
    config = TrainConfig(model="faky", dataset_metadata_path=Path(path))
    write_resolved(tmp_path / "a.json", config, {})
    assert "password1" not in (tmp_path / "a.json").read_text()


def test_a_path_that_is_not_utf_8_is_written(tmp_path: Path) -> None:
    config = TrainConfig(model="faky", output_path=Path("d\udcff"))
    write_resolved(tmp_path / "a.json", config, {})
    assert json.loads((tmp_path / "a.json").read_bytes())["output_path"] == "d\udcff"


def test_a_command_line_gives_the_configuration_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = toy_config(
        max_steps=1,
        resume="auto",
        overwrite=False,
        use_gradient_checkpointing=True,
        preview_prompt=("-a 'dog'", "two words"),
        learning_rate=1e-5,
        task="sft:train",
    )
    typed = command_line(given, task="sft:data_process", resume=None)
    words = shlex.split(typed)
    assert words[:3] == ["dstrain", "--model", "faky"]
    assert words[words.index("--max_steps") + 1] == "1"
    assert "--preview_prompt=-a 'dog'" in words
    assert "two words" in words
    assert "--resume" not in words
    assert words[words.index("--task") + 1] == "sft:data_process"
    assert "--use_gradient_checkpointing" in words and "True" not in words
    without = shlex.split(command_line(given, use_gradient_checkpointing=False))
    assert "--no_use_gradient_checkpointing" in without
    unsaid = shlex.split(command_line(given, use_gradient_checkpointing=None))
    assert not any("checkpointing" in word for word in unsaid)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launched = shlex.split(command_line(given))
    assert launched[:5] == ["torchrun", "--nproc_per_node", "2", "-m", "dstrain"]
    assert launched[launched.index("--resume") + 1 :][:1] != ["auto"]


def test_a_cache_is_filled_by_the_command_of_stage_1_where_the_dataset_is_known() -> (
    None
):
    known = toy_config(
        task="sft:train", feature_cache=Path("cache"), overwrite=True, dry_run=True
    )
    advice = refill_advice(known)
    assert advice.startswith("to fill it, run: dstrain --model faky")
    assert "--task sft:data_process" in advice
    assert "--overwrite" not in advice
    assert "--dry_run" not in advice
    unknown = toy_config(task="sft:train", feature_cache=None)
    assert "run the command that filled it" in refill_advice(unknown)


COMMAND = (
    "dstrain --model m --dataset_base_path photos --output_path a-folder-with-a-name "
    "--preview_prompt 'a dog --and a cat' --use_gradient_checkpointing"
)


def test_a_command_on_a_page_is_broken_before_options_and_is_typed_as_it_stands() -> (
    None
):
    lines = continued(COMMAND, "    ")
    assert lines == [
        "    dstrain --model m --dataset_base_path photos \\",
        "        --output_path a-folder-with-a-name \\",
        "        --preview_prompt 'a dog --and a cat' --use_gradient_checkpointing",
    ]
    typed = "\n".join(lines).replace("\\\n", "")
    assert shlex.split(typed) == shlex.split(COMMAND)


def test_a_command_stays_one_line_where_no_shell_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dstrain.config.serialize.READS_ON", False)
    assert continued(COMMAND, "  ") == [f"  {COMMAND}"]


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("learning_rate", 1e-05, "learning_rate = 1e-05"),
        ("learning_rate", "5e-5", "learning_rate = 5e-5"),
        ("learning_rate", "dit=1e-4", 'learning_rate = "dit=1e-4"'),
        ("lora_rank", "08", 'lora_rank = "08"'),
        ("lora_rank", -3, "lora_rank = -3"),
        ("resolution", 512, 'resolution = "512"'),
        ("tiled", "True", "tiled = true"),
        ("use_gradient_checkpointing", False, "use_gradient_checkpointing = false"),
        ("trigger_word", "true", 'trigger_word = "true"'),
        ("preview_prompt", "a", 'preview_prompt = ["a"]'),
        ("preview_prompt", ["1", "b"], 'preview_prompt = ["1", "b"]'),
        ("one_of_a_family", "7", "one_of_a_family = 7"),
        ("trigger_word", 'a"\x7f\n\\é', 'trigger_word = "a\\"\\u007f\\n\\\\é"'),
    ],
)
def test_a_value_is_written_as_toml_that_is_read_back(
    option: str, value: object, line: str
) -> None:
    known = {flag.name: flag for flag in flags(TrainConfig)}
    assert assignment(option, value, known) == line
    (read,) = tomllib.loads(line, parse_float=str).values()
    wanted = value if option in ("preview_prompt", "trigger_word") else read
    assert read in (wanted, [wanted])
