"""Read the training command of a shell script; nothing of it is run."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

from dstrain.errors import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
BATCH_VARIABLE = re.compile(r"%(\w+)(%)")
POWERSHELL_ASSIGNMENT = re.compile(r"\s*\$(env:)?(\w+)\s*=\s*")
FLAG = re.compile(r"--?[A-Za-z]")
SETTERS = ("export", "set", "declare", "local")
RUNNER = re.compile(
    r"(?:accelerate|python[\d.]*|uv|torchrun|deepspeed)(?:\.exe)?", re.IGNORECASE
)
BEFORE = ("nohup", "exec", "time", "sudo", "call")
"""Words before a command that leave it what it is."""
BATCH = (".bat", ".cmd")
WINDOWS = (*BATCH, ".ps1")
"""Endings of scripts in which a backslash parts folders, and escapes nothing."""
BETWEEN = "&|;"
"""What stands between commands of one line."""
QUOTED = r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)"""
QUOTED_ON_WINDOWS = r"""("[^"]*"|'[^']*')"""
NO_WORDS = r"(?<!\S)(?:#.*|(?:\d|&)?(?:>>?|<)\s*(?:&\d|[^\s;|&]+))"
"""A comment, or where output goes: both begin a word, and are not in quotes."""


@dataclass
class Command:
    """A command that runs a Python file or module."""

    script: str
    """The file, or the module, that is run."""
    launcher: list[tuple[str, list[str]]] = field(default_factory=list)
    """The flags before it, each with its values."""
    flags: list[tuple[str, list[str]]] = field(default_factory=list)
    """The flags after it."""
    positional: Sequence[str] = ()
    """The words between it and its first flag."""

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
    suffix = where.suffix.lower()
    mark = r"[\^`]" if suffix in WINDOWS else r"\\"
    for line in re.sub(rf"{mark}[ \t]*\r?\n", " ", text).splitlines():
        try:
            words = _words(line, suffix)
        except ValueError as error:
            raise UsageError(
                where, f"cannot be read as a shell script: {error}"
            ) from error
        for is_between, own in groupby(words, lambda word: not word.strip(BETWEEN)):
            if not is_between:
                _add(script, list(own), BATCH_VARIABLE if suffix in BATCH else VARIABLE)
    return script


def _words(line: str, suffix: str) -> list[str]:
    """Return the words of a line, without comments and without where output goes."""
    if suffix in BATCH and re.match(r"\s*@?(?:rem\b|::)", line, re.IGNORECASE):
        return []
    if suffix == ".ps1" and (found := POWERSHELL_ASSIGNMENT.match(line)):
        line = f"{'export ' if found[1] else ''}{found[2]}={line[found.end() :]}"
    quoted = QUOTED_ON_WINDOWS if suffix in WINDOWS else QUOTED
    line = re.sub(f"{quoted}|{NO_WORDS}", lambda found: found[1] or "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=BETWEEN)
    lexer.whitespace_split = True
    lexer.commenters = ""  # it would end a word at '#', as no shell does
    if suffix in WINDOWS:
        lexer.escape = ""
    if suffix in BATCH:
        lexer.quotes = '"'
    return list(lexer)


def _add(script: Script, words: list[str], variable: "re.Pattern[str]") -> None:
    """Note what a command of a line is, with the variables that are set before it."""
    words = [_expanded(word, script.variables, variable) for word in words]
    is_exported = words[0] == "export"
    if words[0] in SETTERS:
        words = words[1:]
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        script.variables[match[1]] = match[2]
        words = words[1:]
        # Before a command, a variable is its program's.
        if is_exported or words:
            script.exported.add(match[1])
    if not words or is_exported:
        return
    command = _command([*dropwhile(lambda word: word in BEFORE, words)])
    if command is not None:
        script.commands.append(command)
    else:
        script.others.append(words[0])


def _expanded(word: str, variables: dict[str, str], variable: "re.Pattern[str]") -> str:
    """Return a word with the variables that the script sets; others stay."""

    def value(match: "re.Match[str]") -> str:
        return variables.get(match[1] or match[2], match[0])

    return variable.sub(value, word)


def _command(words: Sequence[str]) -> Command | None:
    """Return the command of a line, None for a line that runs no Python."""
    program = words[0].replace("\\", "/").rpartition("/")[2] if words else ""
    if not RUNNER.fullmatch(program):
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
    after = words[index:]
    positional = list(takewhile(lambda word: not FLAG.match(word), after))
    return Command(script, parse_flags(before), parse_flags(after), positional)


def parse_flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag, without dashes, with the words after it."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if FLAG.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found
