"""Options become a configuration; what does not fit is refused by its name."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main

from tests.support.command_lines import BASE, toy_config

Install = Callable[..., Path]
Source = Callable[..., str]
Printed = pytest.CaptureFixture[str]
PLACES = ("--dataset_base_path", "data", "--output_path", "out")
HOOK = """
import click
from dstrain.plugin import hookimpl
api = 2
@click.command('shout')
@click.argument('word')
def shout(word):
    'Shout.'
    print(word.upper())
@hookimpl
def dstrain_commands():
    return (shout,)
"""


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--learning_rate 1e-5 --max_steps=7", {"learning_rate": 1e-5, "max_steps": 7}),
        (
            "--learning_rate 1e-4,text_encoder=1e-5",
            {"learning_rate": "1e-4,text_encoder=1e-5"},
        ),
        ("--variant edit", {"variant": "edit"}),
        ("", {"use_gradient_checkpointing": None}),
        ("--use_gradient_checkpointing", {"use_gradient_checkpointing": True}),
        ("--no-use-gradient-checkpointing", {"use_gradient_checkpointing": False}),
        ("--num_frames 33", {"num_frames": 33}),
        ("--num_frames 17,33", {"num_frames": "17,33"}),
        (
            "--optimizer-args a=1 b=2 --seed 3 --optimizer_args c=4",
            {"optimizer_args": ("a=1", "b=2", "c=4"), "seed": 3},
        ),
        (
            "--lora-target_modules to-q,to_k --lr-scheduler constant_with_warmup --lr-warmup-steps 2",
            {
                "lora_target_modules": "to-q,to_k",
                "lr_scheduler": "constant_with_warmup",
                "lr_warmup_steps": 2,
            },
        ),
        (
            "--preset-lora-path my-data_set --output_path=out-put",
            {"preset_lora_path": Path("my-data_set"), "output_path": Path("out-put")},
        ),
    ],
)
def test_values_reach_the_configuration_with_their_types(
    words: str, values: dict[str, Any], runs: list[TrainConfig]
) -> None:
    assert main([*BASE, *words.split()]) == 0
    assert runs == [toy_config(**values)]
    found = vars(runs[0])
    assert [type(found[name]) for name in values] == list(map(type, values.values()))


def test_an_option_that_is_typed_is_known_by_its_default_too(
    runs: list[TrainConfig],
) -> None:
    assert main([*BASE, "--loss", "huber", "--huber-delta", "0.1"]) == 0
    base = {"model", "toy", "dataset_base_path", "output_path"}
    assert runs[0].typed == base | {"loss", "huber_delta"}


def test_resume_may_stand_alone_or_name_a_path(
    runs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere/record.json").touch()
    for words in ("", "--resume", "--resume --seed 3", "--resume somewhere"):
        assert main([*BASE, *words.split()]) == 0
    assert [config.resume for config in runs] == [None, "auto", "auto", "somewhere"]
    assert runs[2].seed == 3


TRAIN = " ".join(BASE)
REFUSED = {
    "--seed 3": "--model:",
    "--model fakyy": "--model: 'fakyy' 'faky'",
    f"{TRAIN} --batchsize 3": "--batchsize: '--batch_size'",
    f"{TRAIN} --tokeniser_path 3": "--tokeniser_path: '--tokenizer_path'",
    f"{TRAIN} --seed x": "--seed: 'x'",
    f"{TRAIN} --seed": "--seed:",
    f"{TRAIN} --seed 3 4": "command line: (4) --dataset_base_path",
    f"{TRAIN} --optimizer_args": "--optimizer_args:",
    f"{TRAIN} --num_frames many": "--num_frames: 'many'",
    f"{TRAIN} --lr_scheduler constant-with-warmup": "--lr_scheduler:",
    f"{TRAIN} --height 512": "--height: --width",
    f"{TRAIN} --variant edti": "--variant: 'edti' base, edit 'edit'",
    f"{TRAIN} --output_path=": "--output_path:",
    f"{TRAIN} --tokenizer_path here": "--tokenizer_path: --toy",
    f"{TRAIN} stray": "command line: (stray)",
    f"-p nope {TRAIN}": "-p: no:NAME 'nope'",
    f"-p no:nofaky {TRAIN}": "-p: 'nofaky'",
    f"-p no:faky train {TRAIN}": "--model: 'faky'",
    f"{TRAIN} -p no:plugin-faky": "--model: 'faky'",
    "grph": "command line: 'grph' 'graph'",
    "run.toml": "command line: --config run.toml",
    "toy --model faky": "--output:",
    "generate --prompt a --output x.png": "--run: --model_id",
    "generate --model faky --toy --output x.png": "--prompt:",
    "--tokenizer_path here": "--tokenizer_path: faky --model",
    "--max_pixls 64": "--max_pixls: '--max_pixels'",
    "--model faky --model_paths [] --tokenizer_path": "--tokenizer_path:",
}
"""A command line -> the place of the error, then what it must name."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(
    runs: list[TrainConfig], words: str, capsys: Printed
) -> None:
    assert main(words.split(" ")) == 2
    said = capsys.readouterr().err
    place, *named = REFUSED[words].partition(":")
    assert said.startswith(f"dstrain: error: {place}: ")
    assert [one for one in named[-1].split() if one not in said] == []
    assert len(said.splitlines()) <= 4
    assert not runs


def test_the_familys_flags_are_in_help_and_reach_the_configuration(
    runs: list[TrainConfig], capsys: Printed
) -> None:
    for command in ("train", "graph", "generate"):
        for named in ([], ["--model", "faky"]):
            assert main([command, *named, "--help"]) == 0
            assert ("--tokenizer_path" in capsys.readouterr().out) == bool(named)
    given = ["--model_paths", '["a"]', *PLACES, "--tokenizer-path", "here"]
    assert main([*given, "--model", "faky"]) == 0
    assert runs[0].family_options == {"tokenizer_path": "here"}


@pytest.mark.parametrize("name", ["seed", "prompt", "format"])
def test_a_family_flag_named_like_one_of_dstrain_is_refused(
    name: str, fake_plugin: Install, family_source: Source, capsys: Printed
) -> None:
    source = family_source("clashy", options=f"(Option({name!r}, 'Another.'),)")
    modules = {"clashy_record": source}
    fake_plugin("plugin-clashy", {"clashy": "clashy_record:MODEL"}, modules)
    assert main(["--model", "clashy"]) == 2
    said = capsys.readouterr().err
    assert "plugin-clashy" in said and f"--{name}" in said


@pytest.fixture
def listed(fake_plugin: Install, family_source: Source) -> None:
    fields = {
        "model_files": "{'Some/Model': {'dit': 'dit/*.safetensors'}}",
        "pipeline_classes": "('SomePipeline',)",
        "options": "(Option('shade', 'A shade.'),)",
    }
    modules = {"shady_record": family_source("shady", **fields)}
    fake_plugin("plugin-shady", {"shady": "shady_record:MODEL"}, modules)


@pytest.mark.usefixtures("listed")
def test_an_id_tells_the_family_and_its_flags_are_known(
    runs: list[TrainConfig], tmp_path: Path
) -> None:
    words = ["--model_id", "Some/Model@v2", *PLACES]
    assert main([*words, "--shade", "blue"]) == 0
    file = tmp_path / "run.toml"
    file.write_text('model_id = "Some/Model@v2"\nshade = "blue"\nseed = 3\n')
    assert main(["--config", str(file), *PLACES]) == 0
    for config in runs:
        assert (config.model, config.model_id) == ("shady", "Some/Model@v2")
        assert config.family_options == {"shade": "blue"}
    assert runs[1].seed == 3
    # --model is taken at its word.
    assert main(["--model", "faky", *words]) == 0
    assert runs[2].model == "faky"


def fresh(*words: str) -> tuple[str, set[str]]:
    """Run a command in a process of its own; return what it prints and imports."""
    code = (
        "import sys\nfrom dstrain.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
        "print('', *sys.modules, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done.stdout, set(done.stdout.splitlines())


@pytest.mark.parametrize(
    "words", ["--help", "", "train --help", "graph --help", "generate --help", "models"]
)
def test_help_imports_no_torch_and_no_plugin(words: str, fake_plugin: Install) -> None:
    modules = {"faky_record": "raise SystemExit(9)"}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)
    fake_plugin("extra-faky", {"extra": "faky_record"}, {}, group="dstrain")
    heavy = {"torch", "numpy", "PIL", "transformers", "faky_record", "pluggy"}
    assert not heavy & fresh(*words.split())[1]


def test_a_plugin_adds_a_command(fake_plugin: Install, capsys: Printed) -> None:
    shouting = {"shouting": "extra_shout"}
    fake_plugin("extra-shout", shouting, {"extra_shout": HOOK}, group="dstrain")
    gone = {"extra_gone": "import not_there_at_all"}
    fake_plugin("extra-gone", {"gone": "extra_gone"}, gone, group="dstrain")
    assert main(["shout", "hi"]) == 0
    said = capsys.readouterr()
    assert said.out == "HI\n"
    assert "extra-gone" in said.err
    assert main(["shuot", "hi"]) == 2
    assert "'shout'" in capsys.readouterr().err
    assert main(["shout", "-h"]) == 0
    assert "Shout." in capsys.readouterr().out
    for words in ("-p no:shouting shout hi", "shout -p no:shouting hi"):
        assert main(words.split()) == 2
        assert "'shout'" in capsys.readouterr().err
    assert main(["shout", "hi", "-p", "no:other"]) == 2
    assert "no plugin named 'other'" in capsys.readouterr().err
    assert main(["shout", "hi", "-p", "no:gone"]) == 0
