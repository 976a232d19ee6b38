"""Spelling of flags, the default command, what is imported, and errors in one form."""

import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import click
import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]


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


@pytest.mark.parametrize("word", ["caption", "import"])
def test_the_package_of_a_missing_command_is_named(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-p", "no:tools", word, "photos"]) == 2
    printed = capsys.readouterr().err
    assert f"no command named '{word}'" in printed
    assert "pip install ./plugins/tools" in printed


def test_a_letter_that_the_output_cannot_take_is_escaped(
    fake_plugin: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import click\nfrom dstrain.registry.hooks import hookimpl\n@click.command('say')\n"
        "def say():\n    print('caf\\u00e9 \\u72d7')\n@hookimpl\ndef dstrain_commands():\n    return (say,)\n"
    )
    fake_plugin(
        "extra-say", {"saying": "extra_say"}, {"extra_say": source}, group="dstrain"
    )
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="cp1252"))
    assert main(["say"]) == 0
    assert written.getvalue().decode("cp1252") == "café \\u72d7\n"
