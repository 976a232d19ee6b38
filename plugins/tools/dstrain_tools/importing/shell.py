"""Read the training command of a shell script; nothing of it is run."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.errors import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
SETTERS = ("export", "set", "declare", "local")
RUNNERS = ("accelerate", "python", "python3", "uv", "torchrun", "deepspeed")


@dataclass
class Command:
    """A command that runs a Python file or module."""

    script: str
    """The file, or the module, that is run."""
    launcher: list[tuple[str, list[str]]] = field(default_factory=list)
    """The flags before it, each with its values."""
    flags: list[tuple[str, list[str]]] = field(default_factory=list)
    """The flags after it."""

    @property
    def trains(self) -> bool:
        """Return whether it is a training script, and not one that fills a cache."""
        return "train" in Path(self.script).name and "cache" not in self.script


@dataclass
class Script:
    """What a shell script says."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    """Names of variables that the commands' programs see."""
    others: list[str] = field(default_factory=list)
    """First words of other lines."""


def read_script(text: str, where: Path) -> Script:
    """Return the commands and variables of a script.

    Raises UsageError for a line that a shell could not read either.
    """
    script = Script()
    joined = re.sub(r"[\\^`][ \t]*\r?\n", " ", text)
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(
                where, f"cannot be read as a shell script: {error}"
            ) from error
        words = [_expanded(word, script.variables) for word in words]
        is_exported = bool(words) and words[0] == "export"
        if words and words[0] in SETTERS:
            words = words[1:]
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            script.variables[match[1]] = match[2]
            words = words[1:]
            # Before a command, a variable is its program's.
            if is_exported or words:
                script.exported.add(match[1])
        if not words or is_exported:
            continue
        command = _command(words)
        if command is not None:
            script.commands.append(command)
        else:
            script.others.append(words[0])
    return script


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Return a word with the variables that the script sets; others stay."""

    def value(match: "re.Match[str]") -> str:
        return variables.get(match[1] or match[2], match[0])

    return VARIABLE.sub(value, word)


def _command(words: Sequence[str]) -> Command | None:
    """Return the command of a line, None for a line that runs no Python."""
    if Path(words[0]).name.removesuffix(".exe") not in RUNNERS:
        return None
    index = 0
    script = ""
    while index < len(words):
        word = words[index]
        if word == "-m" and index + 1 < len(words):
            script = words[index + 1]
            index += 2
            break
        if word.endswith(".py"):
            script = word
            index += 1
            break
        index += 1
    if not script:
        return None
    before = [one for one in words[:index] if one not in (script, "-m")]
    return Command(script, parse_flags(before), parse_flags(words[index:]))


def parse_flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag, without dashes, with the words after it."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found
