"""Read the commands and variables of a shell script; nothing of it is run."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path

from dstrain.plugin import UsageError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(
    r"\$(?:\{(?P<list>\w+)\[[@*]\]\}|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>\w+))"
)
OUTPUT = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
"""What a shell replaces by the output of a command, or by the result of a sum."""
BATCH_VARIABLE = re.compile(r"%(?P<bare>\w+)%")
POWERSHELL_ASSIGNMENT = re.compile(r"\s*\$(env:)?(\w+)\s*(\+?=)\s*(@\()?")
GIVEN_LATER = re.compile(r"\$[@*]|\$\{[@*][^}]*\}|\$args|%\*|%~?\d")
"""The words that a script is given when it is run."""
FLAG = re.compile(r"--?[A-Za-z]")
SETTERS = ("export", "set", "declare", "local", "readonly", "typeset")
RUNNER = re.compile(
    r"(?:accelerate|python[\d.]*|uv|torchrun|deepspeed)(?:\.exe)?", re.IGNORECASE
)
BEFORE = (
    "nohup",
    "exec",
    "time",
    "sudo",
    "call",
    "env",
    "nice",
    "ionice",
    "timeout",
    "numactl",
    "taskset",
    "stdbuf",
    "xvfb-run",
    "srun",
    "mpirun",
    "eval",
    "conda",
    "mamba",
    "micromamba",
    "poetry",
    "pdm",
    "pipenv",
    "hatch",
    "pixi",
    "docker",
    "podman",
    "singularity",
    "apptainer",
    "do",
    "then",
    "else",
    "elif",
    "if",
    "while",
    "until",
    "{",
    "!",
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
MODULE = ("-m", "--module")
"""Flags before the name of a module."""
BETWEEN = r"[&|;]+"
BETWEEN_OR_AROUND = r"[&|;()]+"
"""What stands between commands of one line; parentheses are around some."""
QUOTED = rf"""("(?>\\.|{OUTPUT.pattern}|[^"\\])*"|'[^']*'|\\.)"""
QUOTED_IN_BATCH = r"""("[^"\n]*")"""
QUOTED_IN_POWERSHELL = r"""("[^"]*"|'[^']*')"""
REDIRECTION = r"(?<!\S)(?:\d|&)?(?:>>?|<)\s*(?:&\d|[^\s;|&]+)"
"""Where output goes: it begins a word."""
LIST = "("
"""What a variable is set to where a list of words follows, up to the next `)`."""
WHOLE_LIST = r"""\b\w+\+?=\((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^)"'\\])*\)"""
HOME_MARK = "~"
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
    given_later: Sequence[str] = ()
    """The words for those that the script is given, such as `$@`."""
    cut_off: list[tuple[int, str]] = field(default_factory=list)
    """Flags on lines behind it, to which no mark goes on, each with the line's number."""

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
    current: Command | None = None
    """The command that was read last, None behind another line."""


def read_script(text: str, where: Path) -> Script:
    """Return the commands and variables of a script.

    Raises UsageError for a line that a shell could not read either.
    """
    script = Script()
    suffix = where.suffix.lower()
    for number, line in _lines(text, suffix):
        for part in _parts(line, suffix):
            try:
                if words := _words(part, suffix, script):
                    _add(script, words, number)
            except ValueError as error:
                what = f"line {number} cannot be read as a shell script: {error}"
                raise UsageError(where, what) from error
    return script


def _parts(line: str, suffix: str) -> Iterator[str]:
    """Yield the commands of a line."""
    between = BETWEEN if suffix in WINDOWS else BETWEEN_OR_AROUND
    whole = f"{WHOLE_LIST}|{REDIRECTION}|{OUTPUT.pattern}|\\$\\{{[^}}]*\\}}"
    start = 0
    for match in re.finditer(f"{_quoted(suffix)}|{whole}|(?P<between>{between})", line):
        if match["between"]:
            yield line[start : match.start()]
            start = match.end()
    yield line[start:]


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
    begin = r"\$\w+\s*\+?=\s*@\(" if suffix == ".ps1" else r"\b\w+\+?=\("
    pattern = re.compile(
        rf"(?P<goes_on>{mark}[ \t]*\r?\n)|{_quoted(suffix)}|{comment}"
        rf"|(?P<list>{begin})|(?P<closed>\))|(?P<end>\r?\n)",
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
    if suffix == ".ps1":
        line = _without_powershell(line)
    lexer = shlex.shlex(_expanded(line, suffix, script), posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # it would end a word at '#', as no shell does
    if suffix in WINDOWS:
        lexer.escape = ""
    if suffix in BATCH:
        lexer.quotes = '"'
    return list(lexer)


def _without_powershell(line: str) -> str:
    """Return a line of PowerShell with variables and lists as another shell has them."""

    def splatted(match: "re.Match[str]") -> str:
        return match[1] or f"${match[2]}"

    line = re.sub(rf"{QUOTED_IN_POWERSHELL}|(?<!\S)@(\w+)", splatted, line)
    found = POWERSHELL_ASSIGNMENT.match(line)
    if found is None:
        return line
    is_exported, name, sign, begins_list = found.groups()
    value = line[found.end() :]
    if begins_list:
        # Commas part its words.
        pattern = f"{QUOTED_IN_POWERSHELL}|,"
        words = re.sub(pattern, lambda one: one[1] or " ", value)
        value = f"{LIST} {words}"
    return f"{'export ' if is_exported else ''}{name}{sign}{value}"


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
        if OUTPUT.fullmatch(match[0]):
            return f'"{shlex.quote(match[0])}"'
        words = _value(match, script)
        if match.groupdict()["list"]:
            return f'"{shlex.join(words)}"'
        return f'"{shlex.quote(" ".join(words))}"'

    def expanded(match: "re.Match[str]") -> str:
        text = match[0]
        if text.startswith('"'):
            if suffix in WINDOWS:
                return VARIABLE.sub(in_quotes, text)
            return re.sub(f"{OUTPUT.pattern}|{VARIABLE.pattern}", in_quotes, text)
        if match[1]:
            return text
        if suffix not in WINDOWS and OUTPUT.fullmatch(text):
            return shlex.quote(text)
        before = line[: match.start()]
        # Without quotes a value is several words, but where a variable is set to it.
        is_set = bool(re.search(r"(?:^|\s)[A-Za-z_]\w*\+?=\S*$", before))
        if text == HOME_MARK:
            begins_word = is_set or not before or before[-1].isspace()
            is_home = begins_word and suffix not in WINDOWS
            return shlex.quote(str(Path.home())) if is_home else text
        if not VARIABLE.fullmatch(text):
            return "" if re.fullmatch(REDIRECTION, text) else text
        words = _value(match, script)
        if suffix not in WINDOWS and not is_set:
            words = [part for word in words for part in word.split()]
        elif is_set or len(words) < 2:
            return shlex.quote(" ".join(words))
        return shlex.join(words)

    pattern = (
        f"{_quoted(suffix)}|{REDIRECTION}|{OUTPUT.pattern}|{VARIABLE.pattern}"
        rf"|{HOME_MARK}(?=[/\s]|$)"
    )
    return re.sub(pattern, expanded, line)


def _value(match: "re.Match[str]", script: Script) -> list[str]:
    """Return the words of a variable that the script sets, or that has a default; any
    other stays.
    """
    found = match.groupdict()
    name = found["bare"] or found["braced"] or found["list"]
    if name in script.variables:
        return script.variables[name]
    if name == "HOME":
        return [str(Path.home())]
    default = found.get("default")
    return [match[0] if default is None else default.strip("\"'")]


def _add(script: Script, words: list[str], number: int) -> None:
    """Note what a command of a line is, with the variables that are set before it.

    number: That of the line.
    """
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
    if FLAG.match(words[0]) and script.current is not None:
        names = [name for name, _ in parse_flags(words)]
        script.current.cut_off += [(number, name) for name in names]
        return
    script.current = _command(_unwrapped(words))
    if script.current is not None:
        script.commands.append(script.current)
    else:
        script.others.append(words[0])


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command without those before it, such as `nohup`."""
    if words[0] == "eval":
        words = ["eval", *shlex.split(" ".join(words[1:]))]
    # A cell of a notebook marks a command of the shell.
    own = [words[0].lstrip("!%") or words[0], *words[1:]]
    if own[0] not in BEFORE:
        return own
    return [*dropwhile(lambda word: not _is_runner(word), own)] or own[1:] or own


def _is_runner(word: str) -> bool:
    """Return whether a word is a program that runs Python, or one that only a shell knows."""
    name = word.replace("\\", "/").rpartition("/")[2]
    return bool(RUNNER.fullmatch(name) or VARIABLE.fullmatch(word))


def _command(words: Sequence[str]) -> Command | None:
    """Return the command of a line, None for a line that runs no Python."""
    if not words or not _is_runner(words[0]):
        return None
    index = 0
    script = ""
    while index < len(words):
        word = words[index]
        is_module = word in MODULE and index + 1 < len(words)
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
    left_out = (script, *MODULE, *LAUNCHERS)
    before = [one for one in words[:index] if one not in left_out]
    later = [one for one in words[index:] if GIVEN_LATER.fullmatch(one)]
    after = [one for one in words[index:] if one not in later]
    positional = list(takewhile(lambda word: not FLAG.match(word), after))
    flags = parse_flags(after)
    return Command(script, parse_flags(before), flags, positional, later)


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
