"""Read the commands and variables of a shell script; nothing of it is run."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

from dstrain.errors import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(
    r"\$(?:\{(?P<list>\w+)\[[@*]\]\}|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>\w+))"
)
OUTPUT = re.compile(r"\$\([^)]*\)\)?|`[^`]*`")
"""What a shell replaces by the output of a command, or by the result of a sum."""
BATCH_VARIABLE = re.compile(r"%(?P<bare>\w+)%")
POWERSHELL_ASSIGNMENT = re.compile(r"\s*\$(env:)?(\w+)\s*=\s*")
FLAG = re.compile(r"--?[A-Za-z]")
SETTERS = ("export", "set", "declare", "local", "readonly", "typeset")
RUNNER = re.compile(
    r"(?:accelerate|python[\d.]*|uv|torchrun|deepspeed)(?:\.exe)?", re.IGNORECASE
)
BEFORE = (
    *(
        "nohup",
        "exec",
        "time",
        "sudo",
        "call",
        "env",
        "nice",
        "srun",
        "conda",
        "poetry",
    ),
    *("do", "then", "else", "if", "{", "(", "!"),
)
"""Words before a command that leave it what it is."""
BATCH = (".bat", ".cmd")
WINDOWS = (*BATCH, ".ps1")
"""Endings of scripts in which a backslash parts folders, and escapes nothing."""
LAUNCHERS = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launch",
)
"""Modules that run another program."""
BETWEEN = "&|;"
"""What stands between commands of one line."""
QUOTED = r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)"""
QUOTED_IN_BATCH = r"""("[^"\n]*")"""
QUOTED_IN_POWERSHELL = r"""("[^"]*"|'[^']*')"""
REDIRECTION = r"(?<!\S)(?:\d|&)?(?:>>?|<)\s*(?:&\d|[^\s;|&]+)"
"""Where output goes: it begins a word."""
LIST = "("
"""What a variable is set to where a list of words follows, up to the next `)`."""
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
"""What begins a text that ends at a line with this word."""


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
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Each with its words: one, but for a list."""
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
    for number, line in _lines(text, suffix):
        try:
            words = _words(line, suffix, script)
        except ValueError as error:
            what = f"line {number} cannot be read as a shell script: {error}"
            raise UsageError(where, what) from error
        for is_between, own in groupby(words, _is_between):
            if not is_between:
                _add(script, list(own))
    return script


def _quoted(suffix: str) -> str:
    """Return the pattern of what a shell takes as it is."""
    if suffix in BATCH:
        return QUOTED_IN_BATCH
    return QUOTED_IN_POWERSHELL if suffix in WINDOWS else QUOTED


def _lines(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script without comments, each with its number: a text in
    quotes, a list of words, or a mark at the end of a line makes one of several.
    """
    mark = r"[\^`]" if suffix in WINDOWS else r"\\"
    comment = r"(?P<comment>(?<!\S)#.*)"
    if suffix in BATCH:
        comment = r"(?P<comment>(?i:(?<!\S)#.*|^[ \t]*@?(?:rem\b|::).*))"
    pattern = re.compile(
        rf"(?P<goes_on>{mark}[ \t]*\r?\n)|{_quoted(suffix)}|{comment}"
        r"|(?P<list>\b\w+\+?=\()|(?P<closed>\))|(?P<end>\r?\n)",
        re.MULTILINE,
    )
    line = ""
    in_list = False
    place = 0
    number = 1
    while match := pattern.search(text, place):
        line += text[place : match.start()]
        place = match.end()
        if match["goes_on"] or (match["end"] and in_list):
            line += " "
        elif match["list"]:
            in_list = True
            line += f"{match[0]} "
        elif match["closed"]:
            line += " ) " if in_list else match[0]
            in_list = False
        elif match["end"]:
            yield number, line
            if suffix not in WINDOWS and (here := HERE.search(line)):
                place = _end_of(here[2], text, place)
            line = ""
            number = text.count("\n", 0, place) + 1
        elif not match["comment"]:
            line += match[0]
    yield number, line + text[place:]


def _end_of(word: str, text: str, place: int) -> int:
    """Return where a text ends that is no part of the script."""
    end = re.compile(rf"^\t*{word}[ \t]*\r?$", re.MULTILINE).search(text, place)
    return end.end() if end else len(text)


def _words(line: str, suffix: str, script: Script) -> list[str]:
    """Return the words of a line, with the values of variables that the script sets, and
    without where output goes.
    """
    if suffix == ".ps1" and (found := POWERSHELL_ASSIGNMENT.match(line)):
        line = f"{'export ' if found[1] else ''}{found[2]}={line[found.end() :]}"
    lexer = shlex.shlex(
        _expanded(line, suffix, script), posix=True, punctuation_chars=BETWEEN
    )
    lexer.whitespace_split = True
    lexer.commenters = ""  # it would end a word at '#', as no shell does
    if suffix in WINDOWS:
        lexer.escape = ""
    if suffix in BATCH:
        lexer.quotes = '"'
    return list(lexer)


def _expanded(line: str, suffix: str, script: Script) -> str:
    """Return a line with the values of variables that the script sets, in quotes where
    they are one word; other variables stay.
    """
    if suffix in BATCH:
        line = re.sub(
            f"{QUOTED_IN_BATCH}|{REDIRECTION}", lambda found: found[1] or "", line
        )
        # Before it looks at words, this shell puts the text in place.
        return BATCH_VARIABLE.sub(lambda one: " ".join(_value(one, script)), line)

    def in_quotes(match: "re.Match[str]") -> str:
        # The quotes end before the value, and begin again behind it.
        words = _value(match, script)
        if match.groupdict()["list"]:
            return f'"{shlex.join(words)}"'
        return f'"{shlex.quote(" ".join(words))}"'

    def expanded(match: "re.Match[str]") -> str:
        text = match[0]
        if text.startswith('"'):
            return VARIABLE.sub(in_quotes, text)
        if match[1]:
            return text
        if suffix not in WINDOWS and OUTPUT.fullmatch(text):
            return shlex.quote(text)
        if not VARIABLE.fullmatch(text):
            return "" if re.fullmatch(REDIRECTION, text) else text
        words = _value(match, script)
        # Without quotes a value is several words, but where a variable is set to it.
        is_set = re.search(r"(?:^|\s)[A-Za-z_]\w*\+?=\S*$", line[: match.start()])
        if suffix not in WINDOWS and not is_set:
            words = [part for word in words for part in word.split()]
            return shlex.join(words)
        return shlex.quote(" ".join(words))

    pattern = f"{_quoted(suffix)}|{REDIRECTION}|{OUTPUT.pattern}|{VARIABLE.pattern}"
    return re.sub(pattern, expanded, line)


def _value(match: "re.Match[str]", script: Script) -> list[str]:
    """Return the words of a variable that the script sets, or that has a default; any
    other stays.
    """
    found = match.groupdict()
    name = found["bare"] or found["braced"] or found["list"]
    if name in script.variables:
        return script.variables[name]
    default = found.get("default")
    return [match[0] if default is None else default.strip("\"'")]


def _add(script: Script, words: list[str]) -> None:
    """Note what a command of a line is, with the variables that are set before it."""
    first = words[0]
    if first in SETTERS:
        words = [*dropwhile(lambda word: word.startswith("-"), words[1:])]
    is_set = False
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        name, adds, value = match.groups()
        if value == LIST and ")" in words:
            end = words.index(")")
            values = words[1:end]
            words = words[end + 1 :]
        else:
            values = [value]
            words = words[1:]
        if adds and name in script.variables:
            before = script.variables[name]
            is_list = value == LIST or len(before) != 1
            values = [*before, *values] if is_list else [before[0] + values[0]]
        script.variables[name] = values
        is_set = True
        # Before a command, a variable is its program's.
        if first == "export" or words:
            script.exported.add(name)
    if first in SETTERS and not is_set:
        script.others.append(first)
        return
    if not words or first == "export":
        return
    own = words
    if words[0] in BEFORE:
        own = [*dropwhile(lambda word: not _is_runner(word), words)]
        own = own or words[1:] or words
    command = _command(own)
    if command is not None:
        script.commands.append(command)
    else:
        script.others.append(words[0])


def _is_between(word: str) -> bool:
    """Return whether a word stands between commands; an empty one is an argument."""
    return word != "" and not word.strip(BETWEEN)


def _is_runner(word: str) -> bool:
    """Return whether a word is a program that runs Python."""
    return bool(RUNNER.fullmatch(word.replace("\\", "/").rpartition("/")[2]))


def _command(words: Sequence[str]) -> Command | None:
    """Return the command of a line, None for a line that runs no Python."""
    if not words or not _is_runner(words[0]):
        return None
    index = 0
    script = ""
    while index < len(words):
        word = words[index]
        is_module = word == "-m" and index + 1 < len(words)
        if is_module and words[index + 1] not in LAUNCHERS:
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
    left_out = (script, "-m", *LAUNCHERS)
    before = [one for one in words[:index] if one not in left_out]
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
