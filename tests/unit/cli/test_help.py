"""-h shows what most users need, --help everything; both fit a terminal."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.config import flags

OPTION = re.compile(r"^  (--\w+|-\w)", re.MULTILINE)
COMMANDS = {
    "": "cache generate graph models plugins toy train",
    "cache": "ls prune verify",
    "plugins": "new",
}
"""The public commands and their own."""
EVERY_COMMAND = [
    "",
    *(
        f"{group} {name}".strip()
        for group in COMMANDS
        for name in COMMANDS[group].split()
    ),
]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Words of a command -> what it prints; it ends well, and says nothing else."""

    def run(words: str) -> str:
        assert main(words.split()) == 0
        said = capsys.readouterr()
        assert not said.err
        return said.out

    return run


def listed(text: str, heading: str = "Commands") -> Iterator[list[str]]:
    """Yield the words of each line below a heading."""
    lines = text.partition(f"{heading}:\n")[2].partition("\n\n")[0].splitlines()
    return (line.split() for line in lines)


@pytest.mark.parametrize("words", EVERY_COMMAND)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_every_command_fits_80_columns(
    words: str, flag: str, shown: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(f"{words} {flag}")
    assert text.startswith(f"Usage: dstrain {words}".rstrip())
    assert max(map(len, text.splitlines())) <= 80
    found = [(line[0], line[-1][-1]) for line in listed(text)]
    # None is cut.
    assert "..." not in text.partition("Commands:")[2]
    assert found == [(name, ".") for name in COMMANDS.get(words, "").split()]


def test_the_short_help_has_the_common_options_and_says_how_many_more_there_are(
    shown: Callable[[str], str],
) -> None:
    text = shown("train -h")
    common = {f"--{flag.name}" for flag in flags(TrainConfig) if flag.common}
    found = set(OPTION.findall(text))
    assert found == common | {"--config", "-h", "--help"}
    every = OPTION.findall(shown("train --help"))
    assert len(every) == len(set(every))
    end = text.splitlines()[-1]
    assert end.split()[0] == str(len(every) - len(found))
    assert end.endswith("dstrain train --help")
    assert len(text.splitlines()) <= 100  # two screens
    # A description is cut behind a clause, not within a name such as dit.blocks.3.
    assert text.count("(") == text.count(")")


def test_the_short_help_has_the_options_of_the_family_that_is_named(
    shown: Callable[[str], str],
    fake_plugin: Callable[..., Path],
    family_source: Callable[..., str],
) -> None:
    modules = {
        "shady_record": family_source("shady", options="(Option('shade', 'A.'),)")
    }
    fake_plugin("plugin-shady", {"shady": "shady_record:MODEL"}, modules)
    for words, has in (
        ("-h", False),
        ("train -h", False),
        ("--model shady -h", True),
        ("graph -h --model shady", True),
    ):
        text = shown(words)
        assert ("--shade" in text) == has
        places = [text.find(f"\n{one}:") for one in ("model", "shady", "data")]
        assert not has or places == sorted(places)


def test_commands_of_plugins_are_listed_without_importing_these(
    shown: Callable[[str], str], fake_plugin: Callable[..., Path]
) -> None:
    broken = {"extra_broken": "raise SystemExit(9)"}
    entries = {"shout": "extra_broken", "train": "extra_broken"}
    fake_plugin("extra-shout", entries, broken, group="dstrain.commands")
    for words in ("-h", "--help", ""):
        rows = [row[:3] for row in listed(shown(words), "Commands of plugins")]
        assert ["shout", "From", "extra-shout;"] in rows
        assert "train" not in [row[0] for row in rows]
    assert "extra_broken" not in sys.modules
