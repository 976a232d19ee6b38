"""Spelling of flags, the default command, what is imported, and errors in one form."""

import json
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from dstrain.cli.main import command_group, main
from dstrain.cli.unsupported import INSTEAD
from dstrain.config.fields import Group, flags
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.errors import Diverged, Interrupted

Install = Callable[..., Path]
Source = Callable[..., str]
BASE = (
    "--model",
    "faky",
    "--toy",
    "--dataset_base_path",
    "data",
    "--output_path",
    "out",
)


@pytest.fixture
def runs(
    fake_plugin: Install, family_source: Source, monkeypatch: pytest.MonkeyPatch
) -> list[TrainConfig]:
    """The configurations that the runner is given; the family `faky` is installed."""
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    given: list[TrainConfig] = []
    runner = types.ModuleType("dstrain.runs.runner")
    runner.start = given.append
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", runner)
    return given


def answer_of(
    body: Callable[[TrainConfig], None], monkeypatch: pytest.MonkeyPatch, *more: str
) -> int:
    monkeypatch.setattr(sys.modules["dstrain.runs.runner"], "start", body)
    return main([*BASE, *more])


def test_help_and_models_import_neither_torch_nor_a_plugin(
    fake_plugin: Install,
) -> None:
    site = fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": "raise SystemExit(9)"},
    )
    fake_plugin("extra-faky", {"extra": "faky_record"}, {}, group="dstrain")
    env = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    heavy = {"torch", "numpy", "PIL", "transformers", "faky_record", "pluggy"}
    for words in (
        ["--help"],
        [],
        ["train", "--help"],
        ["graph", "--help"],
        ["generate", "--help"],
        ["models"],
        ["--version"],
    ):
        code = (
            f"import sys; from dstrain.cli.main import main; c = main({words!r}); "
            f"print(c, {heavy!r} & set(sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env
        )
        assert done.stdout.splitlines()[-1] == "0 set()", (
            words,
            done.stdout[-300:],
            done.stderr,
        )


def test_help_names_every_flag_as_documented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    words = capsys.readouterr().out.split()
    for flag in flags(TrainConfig):
        assert flag.spelled in words
    groups = [group for group in typing.get_args(Group) if group != "generation"]
    places = [words.index(f"{group}:") for group in groups]
    assert places == sorted(places)


def test_the_family_adds_its_flags_to_help(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "graph", "generate"):
        assert main([command, "--help"]) == 0
        assert "--tokenizer_path" not in capsys.readouterr().out
        assert main([command, "--model", "faky", "--help"]) == 0
        assert "--tokenizer_path" in capsys.readouterr().out


@pytest.mark.parametrize("first", [(), ("train",), ("--debug",), ("--debug", "train")])
def test_an_option_or_train_means_train(
    runs: list[TrainConfig], first: tuple[str, ...]
) -> None:
    assert main([*first, *BASE]) == 0
    assert runs == [
        TrainConfig(
            model="faky",
            toy=True,
            dataset_base_path=Path("data"),
            output_path=Path("out"),
        )
    ]


def test_values_reach_the_configuration_with_their_types(
    runs: list[TrainConfig],
) -> None:
    assert (
        main(
            [
                *BASE,
                "--learning_rate",
                "1e-5",
                "--max_steps=7",
                "--use_gradient_checkpointing",
                "--variant",
                "edit",
            ]
        )
        == 0
    )
    config = runs[0]
    assert (
        config.learning_rate,
        config.max_steps,
        config.use_gradient_checkpointing,
    ) == (1e-5, 7, True)
    assert config.variant == "edit"


def test_option_names_are_folded_and_values_are_not(runs: list[TrainConfig]) -> None:
    words = [
        "--model",
        "faky",
        "--toy",
        "--dataset-base-path",
        "my-data_set",
        "--output_path=out-put",
    ]
    words += [
        "--lora-target_modules",
        "to-q,to_k",
        "--lr-scheduler",
        "constant_with_warmup",
        "--lr-warmup-steps",
        "2",
    ]
    assert main(words) == 0
    assert runs[0].dataset_base_path == Path("my-data_set")
    assert (runs[0].output_path, runs[0].lora_targets) == (
        Path("out-put"),
        ("to-q", "to_k"),
    )
    assert (
        main(
            [*BASE, "--lr_scheduler", "constant-with-warmup", "--lr_warmup_steps", "2"]
        )
        == 2
    )
    assert len(runs) == 1


def test_resume_may_stand_alone_or_name_a_path(runs: list[TrainConfig]) -> None:
    for more in (
        (),
        ("--resume",),
        ("--resume", "--seed", "3"),
        ("--resume", "somewhere"),
    ):
        assert main([*BASE, *more]) == 0
    assert [config.resume for config in runs] == [None, "auto", "auto", "somewhere"]
    assert runs[2].seed == 3


def test_the_familys_flags_reach_the_configuration(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "--model_paths",
        '["a"]',
        "--dataset_base_path",
        "d",
        "--output_path",
        "o",
        "--tokenizer-path",
        "here",
    )
    assert main([*given, "--model", "faky"]) == 0
    assert runs[0].family_options == {"tokenizer_path": "here"}
    assert main([*BASE, "--tokenizer_path", "here"]) == 2
    assert (
        "--tokenizer_path: has no effect: --toy builds its own tokenizer"
        in capsys.readouterr().err
    )


def test_a_familys_flag_without_its_value_is_refused(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model_paths", '["a"]', "--dataset_base_path", "d", "--output_path", "o")
    assert main([*given, "--model", "faky", "--tokenizer_path"]) == 2
    assert not runs
    assert "--tokenizer_path" in capsys.readouterr().err


def test_a_family_flag_named_like_one_of_ours_is_refused(
    fake_plugin: Install, family_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    source = family_source("clashy", options="(Option('seed', 'Another seed.'),)")
    fake_plugin(
        "plugin-clashy", {"clashy": "clashy_record:MODEL"}, {"clashy_record": source}
    )
    assert main(["--model", "clashy"]) == 2
    assert (
        "plugin plugin-clashy 1.0: its flag --seed is already one of dstrain's own"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--network_dim", "want --lora_rank"),
        ("--max_train_steps", "want --max_steps"),
        ("--resume_from", "want --resume PATH, which goes on where a run stopped"),
        (
            "--dataset_config",
            "want --dataset_base_path DIR, with a metadata file in it: docs/guide/datasets.md",
        ),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_flag_of_another_trainer_is_told_what_is_wanted_instead(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"dstrain: error: {flag}: no such option",
        f"  {advice}",
    ]


def test_no_advice_is_for_a_flag_that_exists_or_names_one_that_does_not() -> None:
    known = {
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    } | {"config", "debug"}
    assert not known & set(INSTEAD)
    wanted = {
        name for advice in INSTEAD.values() for name in re.findall(r"--(\w+)", advice)
    }
    assert wanted <= known | {"config_file"}


@pytest.mark.parametrize(
    ("words", "first_line"),
    [
        (["--seed", "3"], "--model: is required"),
        (["--model", "fakyy"], "--model: no model named 'fakyy'; installed: "),
        (
            [*BASE, "--batchsize", "3"],
            "--batchsize: no such option; did you mean '--batch_size'?",
        ),
        (
            [*BASE, "--tokeniser_path", "3"],
            "--tokeniser_path: no such option; did you mean '--tokenizer_path'?",
        ),
        ([*BASE, "--seed", "x"], "--seed: 'x' is not a valid integer"),
        ([*BASE, "--seed"], "--seed: option '--seed' requires an argument"),
        ([*BASE, "--height", "512"], "--height: is given without --width"),
        (
            [*BASE, "--variant", "edti"],
            "--variant: faky has no variant 'edti'; variants: base, edit; did you mean 'edit'?",
        ),
        ([*BASE, "--output_path", ""], "--output_path: is empty"),
        ([*BASE, "stray"], "command line: got unexpected extra argument (stray)"),
        (
            ["grph"],
            "command line: no command named 'grph'; commands: train, graph, generate, ",
        ),
        (["-p", "nope", *BASE], "-p: want no:NAME, got 'nope'"),
        (["-p", "no:fakyy", *BASE], "-p: no plugin named 'fakyy'; installed: "),
        (["-p", "no:faky", *BASE], "--model: no model named 'faky'; installed: "),
        (
            [*BASE, "-p", "no:plugin-faky"],
            "--model: no model named 'faky'; installed: ",
        ),
        (["toy", "--model", "faky"], "--output: is required"),
        (
            ["export", "a", "b", "--format", "komfy"],
            "--format: want one of diffusers, comfyui, kohya, diffsynth, got 'komfy'; did you mean 'comfyui'?",
        ),
        (
            ["generate", "--model", "faky", "--toy", "--output", "x.png"],
            "--prompt: is required",
        ),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_errors_have_one_form(
    runs: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    first_line: str,
) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"dstrain: error: {first_line}")
    assert len(lines) <= 4
    assert not runs


def test_no_family_flags_without_a_model_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--tokenizer_path", "x"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[1] == "  a family's own flags need --model"
    )


def test_the_runners_errors_keep_their_exit_codes(
    runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in (
        (Diverged("step 3", "loss is NaN"), 5),
        (Interrupted("step 3", "saved"), 75),
        (KeyboardInterrupt(), 75),
        (OSError(28, "No space left on device", "out/x"), 4),
        (RuntimeError("a defect"), 1),
    ):

        def raises(config: TrainConfig, error: BaseException = error) -> None:
            raise error

        assert answer_of(raises, monkeypatch) == code


def test_tracebacks_need_debug(
    runs: list[TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raises(config: TrainConfig) -> None:
        raise ValueError("deep inside")

    assert answer_of(raises, monkeypatch) == 1
    plain = capsys.readouterr().err
    assert (
        "ValueError: deep inside" in plain.splitlines()[0] and "Traceback" not in plain
    )
    assert plain.startswith("dstrain: error: ")
    assert answer_of(raises, monkeypatch, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_public_commands_are_these() -> None:
    assert sorted(command_group().commands) == [
        "export",
        "generate",
        "graph",
        "models",
        "plugins",
        "toy",
        "train",
    ]


def test_a_plugin_adds_a_command(
    fake_plugin: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import click\nfrom dstrain.registry.hooks import hookimpl\n@click.command('shout')\n@click.argument('word')\n"
        "def shout(word):\n    click.echo(word.upper())\n@hookimpl\ndef dstrain_commands():\n    return (shout,)\n"
    )
    fake_plugin(
        "extra-shout",
        {"shouting": "extra_shout"},
        {"extra_shout": source},
        group="dstrain",
    )
    fake_plugin(
        "extra-gone",
        {"gone": "extra_gone"},
        {"extra_gone": "import not_there_at_all"},
        group="dstrain",
    )
    assert main(["shout", "hi"]) == 0
    said = capsys.readouterr()
    assert said.out == "HI\n"
    assert "dstrain: warning: plugin extra-gone 1.0: " in said.err
    assert main(["-p", "no:shouting", "shout", "hi"]) == 2
    assert "no command named 'shout'" in capsys.readouterr().err
    assert isinstance(sys.modules["extra_shout"].shout, click.Command)


def test_plugins_are_listed_as_table_and_as_data(
    fake_plugin: Install, family_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    fake_plugin(
        "plugin-bad",
        {"bad": "bad_record:MODEL"},
        {"bad_record": "1 / 0"},
        version="3.1",
    )
    assert main(["plugins", "--json"]) == 0
    found: dict[str, dict[str, Any]] = {
        row["name"]: row for row in json.loads(capsys.readouterr().out)
    }
    assert found["faky"] == {"name": "faky", "distribution": "plugin-faky", "version": "1.0",
                             "variants": ["base", "edit"], "adds": [], "state": "ready", "reason": ""}  # fmt: skip
    assert (found["bad"]["state"], found["bad"]["version"]) == ("broken", "3.1")
    assert "ZeroDivisionError" in found["bad"]["reason"]
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["faky", "plugin-faky", "1.0", "ready", "base,", "edit"] in rows
    assert main(["models", "-p", "no:bad"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["faky", "plugin-faky", "1.0"] in rows and not any(
        row[0] == "bad" for row in rows
    )
