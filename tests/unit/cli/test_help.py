"""-h shows what most users need, --help everything; both fit a terminal."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from dstrain import TrainConfig
from dstrain.cli.help import first_clause
from dstrain.cli.main import command_group, main
from dstrain.config import flags

Install = Callable[..., Path]
Source = Callable[..., str]
OPTION = re.compile(r"^  (--\w+|-\w)", re.MULTILINE)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints; it ends well, and says nothing else."""
    assert main(words) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


def every_command() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, those of groups included."""
    yield ()
    for name, command in command_group().commands.items():
        yield (name,)
        if isinstance(command, click.Group):
            for inner in command.commands:
                yield (name, inner)


@pytest.mark.parametrize("words", list(every_command()), ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_every_command_fits_80_columns(
    words: tuple[str, ...],
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, *words, flag)
    assert text.startswith(" ".join(["Usage: dstrain", *words]))
    assert max(map(len, text.splitlines())) <= 80
    commands = text.partition("Commands:\n")[2]
    assert "..." not in commands  # none is cut


def test_the_short_help_has_the_common_options_and_says_how_many_more_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "train", "-h")
    common = {f"--{flag.name}" for flag in flags(TrainConfig) if flag.common}
    found = set(OPTION.findall(text))
    assert found == common | {"--recipe", "--config", "-h", "--help"}
    every = OPTION.findall(shown(capsys, "train", "--help"))
    assert len(every) == len(set(every))
    more = len(every) - len(found)
    assert text.endswith(f"\n{more} more options: dstrain train --help\n")
    assert len(text.splitlines()) < 100  # two screens


def test_the_short_help_has_seven_headings_and_the_long_one_has_finer_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    headings = ["model", "data", "training", "LoRA", "memory", "output", "checkpoints"]
    brief = re.findall(r"^(\w[^:\n]*):$", shown(capsys, "train", "-h"), re.MULTILINE)
    assert brief == [*headings, "general"]
    text = shown(capsys, "train", "--help")
    whole = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert list(dict.fromkeys(one.partition(":")[0] for one in whole)) == brief
    assert "data: captions" in whole


def test_the_short_help_has_the_options_of_the_family_that_is_named(
    capsys: pytest.CaptureFixture[str],
    fake_plugin: Install,
    family_source: Source,
) -> None:
    source = family_source("shady", options="(Option('shade', 'A shade.'),)")
    modules = {"shady_record": source}
    fake_plugin("plugin-shady", {"shady": "shady_record:MODEL"}, modules)
    for words in (["-h"], ["train", "-h"]):
        assert "--shade" not in shown(capsys, *words)
    for words in (["--model", "shady", "-h"], ["graph", "-h", "--model", "shady"]):
        assert "--shade" in shown(capsys, *words)


def test_a_plugins_command_has_a_short_help_too(
    capsys: pytest.CaptureFixture[str], fake_plugin: Install
) -> None:
    source = (
        "import click\nfrom dstrain.registry.hooks import hookimpl\n"
        "@click.command('shout')\ndef shout():\n    'Shout.'\n"
        "@hookimpl\ndef dstrain_commands():\n    return (shout,)\n"
    )
    modules = {"extra_shout": source}
    fake_plugin("extra-shout", {"shouting": "extra_shout"}, modules, group="dstrain")
    assert "Shout." in shown(capsys, "shout", "-h")


def test_commands_of_plugins_are_listed_without_importing_these(
    capsys: pytest.CaptureFixture[str], fake_plugin: Install
) -> None:
    broken = {"extra_broken": "raise SystemExit(9)"}
    entries = {"shout": "extra_broken", "train": "extra_broken"}
    fake_plugin("extra-shout", entries, broken, group="dstrain.commands")
    for words in (["-h"], ["--help"], []):
        listed = shown(capsys, *words).partition("Commands of plugins:\n")[2]
        found = [line.split()[:3] for line in listed.splitlines()]
        assert ["shout", "From", "extra-shout;"] in found
        assert ["train", "From", "extra-shout;"] not in found
    assert "extra_broken" not in sys.modules


def test_the_first_clause_ends_where_a_sentence_does_and_nowhere_else() -> None:
    assert first_clause("Side; requires --width.") == "Side"
    assert first_clause("A, .5 of it (as ID). More.") == "A, .5 of it (as ID)"
    assert first_clause("With /X,... or @Y,... for layers; more.") == (
        "With /X,... or @Y,... for layers"
    )


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_headings_and_errors_are_in_colour_only_where_that_is_asked_for(
    variables: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for words in ("train", "-h"), ("train", "--nothing"):
        command = [sys.executable, "-m", "dstrain", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ("\x1b[" in done.stdout + done.stderr) == is_coloured
