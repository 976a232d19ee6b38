"""Log lines and progress bars on stderr, with secrets removed."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote

T = TypeVar("T")

SECONDS_PER_LINE = 60.0
FIRST_LINE = 1.0
"""Seconds after which there is a first line of progress where there is no terminal. The next
one comes after as long again, until it is one in `SECONDS_PER_LINE`.
"""
LINE = "{desc} {n}/{total}, {rate_noinv:.2f}/s, {remaining} left{postfix}"
"""Format of progress where there is no terminal; the names are tqdm's."""
BAR = "{desc} {percentage:.0f}%|{bar}| {n}/{total} {rate_noinv_fmt}, {remaining} left{postfix}"
"""Format of progress on a terminal, short enough for 80 columns."""
TIME_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of lines in a file."""
TIME = "%Y-%m-%d %H:%M:%S"
"""Format of the time before a line where stderr is no terminal."""
LEAST_COLUMN = 24
PAGE_WIDTH = 80
"""Columns of a terminal that pages and lists are written for."""
PLAIN_WORD = re.compile(r"[\w+=:./\\-]+")
"""A word that cmd and PowerShell take as it is: to one or the other, ';', ',', '&', '|' and
more mean something.
"""
LOADING = "loading libraries ..."
"""What a terminal shows while a command imports torch, which takes seconds."""


def is_main_process() -> bool:
    """Return whether this process is the one of a run that reports."""
    return os.environ.get("RANK", "0") == "0"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose records hold no secrets: each has the
    filter, since a parent's does not see its children's records.
    """
    logger = logging.getLogger(name)
    logger.addFilter(RECORD_FILTER)
    return logger


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class RecordFilter(logging.Filter):
    """Keeps the records of the main process, and removes secrets from them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message; return False in every process but the main one."""
        record.msg = printable(redacted(record.getMessage()))
        record.args = ()
        return is_main_process()


RECORD_FILTER = RecordFilter()
FILE_ONLY = MappingProxyType({"file_only": True})
"""`extra` of a line that goes to the log file alone."""


def has_color(stream: Any) -> bool:
    """Return whether what is written to a stream may have colours: that of a terminal,
    unless the environment says otherwise (NO_COLOR, FORCE_COLOR, TERM=dumb).
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb"


MARK = re.compile(r"dstrain: (error|warning):")
"""What a line of an error or a warning begins with."""


def marked(line: str, stream: Any) -> str:
    """Return the line of an error or a warning with its beginning in colour, where the
    stream has colours.
    """
    found = MARK.match(line)
    if found is None or not has_color(stream):
        return line
    import click  # here, since a script has no need of it

    color = "red" if found[1] == "error" else "yellow"
    return click.style(found[0], fg=color, bold=True) + line[found.end() :]


class StderrHandler(logging.Handler):
    """Writes lines to stderr, above the progress bars that are open."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; information as it is, warnings marked as such, each with the
        time where it is read later.
        """
        if getattr(record, "file_only", False):
            return
        line = self.format(record)
        if record.levelno > logging.INFO:
            line = f"dstrain: {record.levelname.lower()}: {line}"
        line = marked(line, sys.stderr)
        if _is_log():
            line = f"{time.strftime(TIME, time.localtime(record.created))} {line}"
        _STATUS.clear()
        _tqdm().write(line, file=sys.stderr)


def _is_log() -> bool:
    """Return whether stderr goes to a file or to another program; what stands in its place
    in a notebook, say, is looked at as a terminal is.
    """
    own = sys.__stderr__
    return own is not None and sys.stderr is own and not own.isatty()


class _Status:
    """A line of the terminal that says what a command waits for, until another one is
    written over it.
    """

    text = ""

    def show(self, text: str) -> None:
        """Show a text; elsewhere than on a terminal of the main process, nothing."""
        if is_main_process() and sys.stderr is not None and sys.stderr.isatty():
            # The cursor goes back to where whoever writes next begins.
            print(f"{text}\r", end="", file=sys.stderr, flush=True)
            self.text = text

    def clear(self) -> None:
        """Remove the text, if it is there."""
        if self.text:
            blank = " " * len(self.text)
            print(f"\r{blank}\r", end="", file=sys.stderr, flush=True)
            self.text = ""


_STATUS = _Status()


@contextmanager
def status(text: str = LOADING) -> Iterator[None]:
    """Show on a terminal what is done inside, until something else is logged."""
    _STATUS.show(text)
    try:
        yield
    finally:
        _STATUS.clear()


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show what dstrain logs on stderr, once, as the command line does."""
    logger = logging.getLogger("dstrain")
    level = logger.level
    handlers = list(logger.handlers)
    if not any(isinstance(handler, StderrHandler) for handler in handlers):
        logger.addHandler(StderrHandler())
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@contextmanager
def silenced(level: int = logging.CRITICAL) -> Iterator[None]:
    """Silence warnings, and all loggers up to a level: for trials that the user did not
    request, and up to warnings for libraries that report on optional parts.
    """
    earlier = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(earlier)


class LogFile(logging.FileHandler):
    """A log file that is given up, silently, where the disk takes no more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a run does not fail for want of its log."""


@contextmanager
def logging_to_file() -> Iterator[Callable[[Path], None]]:
    """Yield a function that opens a log file, to which earlier lines are written too;
    an error that ends the block is logged there as well.
    """
    from logging.handlers import MemoryHandler  # slow, and --help needs none of it

    logger = logging.getLogger("dstrain")
    # Lines wait in memory until the file may be opened.
    buffer = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    added: list[logging.Handler] = [buffer]
    if not logger.hasHandlers() and logging.lastResort is not None:
        # A script without handlers of its own keeps seeing warnings.
        added.append(logging.lastResort)

    def open_file(path: Path) -> None:
        file = LogFile(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter(TIME_FORMAT))
        buffer.setTarget(file)
        buffer.flushLevel = logging.NOTSET
        buffer.flush()

    for handler in added:
        logger.addHandler(handler)
    try:
        yield open_file
    except BaseException as error:
        text = redacted(str(error) or type(error).__name__)
        buffer.handle(logging.LogRecord(__name__, logging.ERROR, "", 0, text, (), None))
        raise
    finally:
        for handler in added:
            logger.removeHandler(handler)
        if buffer.target is not None:
            with suppress(OSError):  # the disk may be full
                buffer.target.close()
        buffer.close()


logger = get_logger(__name__)


class LineLogger:
    """A file that tqdm writes a bar to; it logs each state of the bar as a line."""

    bar: Any = None

    def write(self, text: str) -> None:
        """Log the text, unless it only clears the bar."""
        if text.strip():
            logger.info(text.strip())
            elapsed = self.bar.format_dict["elapsed"]
            self.bar.mininterval = min(max(elapsed, FIRST_LINE), SECONDS_PER_LINE)


def progress_bar(
    title: str, total: int, done: int = 0, brief: bool = False, leave: bool = True
) -> Any:
    """Return a tqdm bar; elsewhere than on a terminal or in a notebook it logs lines, at
    least one a minute.

    Args:
        title: What is counted.
        total: The number of things to do.
        done: How many of them were done before.
        brief: Whether it passes inside other work: it leaves nothing at its end, and
            nothing within its first minute where there is no terminal.
        leave: Whether a terminal shows it after its end.
    """
    options: dict[str, Any] = {"initial": done, "leave": leave and not brief}
    lines = LineLogger()
    if sys.stderr.isatty():
        _STATUS.clear()
        options |= {"dynamic_ncols": True, "bar_format": BAR, "unit": ""}
    elif in_notebook():
        # Text, where there are no widgets; what is written to stderr is red there.
        options["file"] = sys.stdout
    else:
        first = SECONDS_PER_LINE if brief else FIRST_LINE
        options["mininterval"] = options["delay"] = first
        options |= {"miniters": 1, "file": lines, "bar_format": LINE}
        # A bar below another one would move the cursor.
        options["position"] = 0
    # Only where it must be, since tqdm itself reads TQDM_DISABLE.
    if not is_main_process():
        options["disable"] = True
    lines.bar = _tqdm()(desc=title, total=total, **options)
    return lines.bar


def retitle(bar: Any, title: str) -> None:
    """Give a bar another title; a terminal or a notebook shows it at once."""
    bar.set_description_str(title, refresh=sys.stderr.isatty() or in_notebook())


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Take the bars off a terminal while a script writes to it, and draw them again."""
    if in_notebook():
        yield  # a bar is no line of text there
        return
    # Without the lock: what is done inside may wait for threads that log.
    with _tqdm().external_write_mode(file=sys.stdout, nolock=True):
        yield


def printable(text: str) -> str:
    """Return a text of lines with its control characters escaped, as '\\x1b': a terminal
    would obey them, and a name in a message may have any.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shell_command(words: Iterable[str]) -> str:
    """Return a command as it is typed in a shell of this platform."""
    if os.name == "nt":
        return " ".join(map(_word_of_windows, words))
    return shlex.join(words)


def shell_word(word: str) -> str:
    """Return a word of a command as it is typed in a shell of this platform."""
    return shell_command([word])


def _word_of_windows(word: str) -> str:
    """Return a word in double quotes, if it needs any: cmd knows no single ones."""
    text = subprocess.list2cmdline([word])
    if text.startswith('"') or PLAIN_WORD.fullmatch(word):
        return text
    # Backslashes before a quote are doubled.
    slashes = len(text) - len(text.rstrip("\\"))
    return '"' + text + slashes * "\\" + '"'


def number_of(number: int | str, noun: str, plural: str = "") -> str:
    """Return a number, or one as it is written, with its noun, whose plural may not be
    one with 's': '1 row', '1,500 rows'.
    """
    if isinstance(number, int):
        number = f"{number:,}"
    return f"{number} {noun if str(number) == '1' else plural or noun + 's'}"


def counted(title: str, things: Iterable[T], total: int) -> Iterator[T]:
    """Yield things, with a bar of those that were used, which ends with them."""
    with progress_bar(title, total, leave=False) as bar:
        for thing in things:
            yield thing
            bar.update()


class _Lock:
    """Holds the lock of this process, held while a bar or a line is written."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):  # Windows forks nothing
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Make a lock: one that another thread held at a fork is never released."""
        self.own = threading.RLock()


_LOCK = _Lock()


def _tqdm() -> Any:
    """Return tqdm with a lock of this process alone: its own is shared with forked
    processes, and one that is killed while it writes a line would hold it for ever.
    """
    # Late: it would be a sixth of the time of --help.
    if in_notebook():
        with warnings.catch_warnings():
            # Of widgets that are not installed: the bar is text then.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    else:
        from tqdm import tqdm

    tqdm.set_lock(_LOCK.own)
    return tqdm


if in_notebook():
    # Before other libraries import it, which would let it warn of missing widgets.
    _tqdm()


def as_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None
) -> str:
    """Write a table as text, its columns aligned; with a width, the last one is wrapped
    between words, to no less than `LEAST_COLUMN` letters.
    """
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is not None:
        taken = sum(one + 2 for one in widths[:-1])
        widths[-1] = max(width - taken, LEAST_COLUMN)
    text = []
    for *cells, last in lines:
        parts = [last]
        if width is not None:
            # Names may have hyphens.
            parts = textwrap.wrap(
                last, widths[-1], break_on_hyphens=False, break_long_words=False
            )
        for part in parts or [""]:
            text.append("  ".join(map(str.ljust, [*cells, part], widths)).rstrip())
            cells = [""] * len(cells)
    return "\n".join(text)


def fitted(lines: Iterable[str]) -> list[str]:
    """Return the lines of a page; one that is longer than its width is broken between
    words, at first where three spaces are, and continued four columns further right.
    """
    found = []
    for line in lines:
        text = line.lstrip()
        indent = line[: len(line) - len(text)]
        more = f"{indent}    "
        parts = re.split(" {3,}", text) if len(line) > PAGE_WIDTH else [text]
        for number, part in enumerate(parts):
            # Names and paths may have hyphens.
            found += textwrap.wrap(
                part,
                PAGE_WIDTH,
                initial_indent=more if number else indent,
                subsequent_indent=more,
                break_on_hyphens=False,
                break_long_words=False,
            ) or [""]
    return found


HIDDEN = "***"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal may obey, but for tabs and ends of lines."""
SHORTEST = 8
"""Letters a variable's value must have to be taken for a secret: 'no' and '1' stand
everywhere.
"""
NAME = (
    r"[\w-]*(?:token(?!iz)|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential"
    r"|signature|authorization)[\w-]*"
)
"""Pattern of a name whose value is a secret."""
VARIABLE = re.compile(rf"{NAME}|.*_(?:key|pass)", re.IGNORECASE)
"""Names of variables whose values are secrets."""
SECRET = re.compile(
    rf"""
    # A URL's user and password, or the token in their place.
    (\b(?i:[a-z][a-z0-9+.-]+):/{{1,2}}) [^\s/]+ (?=@)
    # name=value in a query, and the like.
    | ([?&;](?i:{NAME}|sig|key|auth)=) [^&;\#\s'"]+
    | (\bBearer\ ) [\w.~+/=-]{{8,}}
    # Tokens of Hugging Face, ModelScope, GitHub, OpenAI and the like, Amazon.
    | \bhf_[A-Za-z0-9]{{16,}}
    | \bms-[0-9a-f]{{8}}-[0-9a-f-]{{20,}}
    | \bgh[pousr]_[A-Za-z0-9]{{20,}} | \bgithub_pat_\w{{20,}}
    | \bsk-(?:[a-z0-9]+-){{0,2}}[A-Za-z0-9]{{20,}}[\w-]*
    | \b(?:AKIA|ASIA)[A-Z0-9]{{16}}\b
    # JSON web tokens.
    | \beyJ[\w-]{{8,}}\.[\w-]{{8,}}\.[\w-]{{8,}}
    """,
    re.VERBOSE,
)
"""Texts that are secrets by their form; a group is what stays before one."""


def secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values of variables named like a secret, with their names."""
    return {
        value: name
        for name, value in environment.items()
        if len(value) >= SHORTEST and VARIABLE.fullmatch(name)
    }


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the text with '***' in place of every secret in it: values of variables
    named like one, and texts of known forms.
    """
    written = set()
    for value in secrets(environment):
        # As it is, in one line, and as it stands in JSON, Python, a URL and a command.
        written |= {value, json.dumps(value)[1:-1], repr(value)[1:-1]}
        written |= {json.dumps(value, ensure_ascii=False)[1:-1], quote(value, safe="")}
        written |= {" ".join(value.split()), shlex.quote(value).strip("'")}
    # The longest first, so that none is left in part.
    for value in sorted(written, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return SECRET.sub(rf"\1\2\3{HIDDEN}", text)


URL = re.compile(r"(\s*[A-Za-z][A-Za-z0-9+.-]*://)([^?#]*)([?#]?)(.*)", re.DOTALL)


def shown(name: str) -> str:
    """Return a name as it may be logged: '***' stands for user and password, query and
    fragment of a URL.
    """
    found = URL.fullmatch(name)
    if found is None:
        return name
    scheme, address, mark, rest = found.groups()
    if "@" in address:
        address = f"{HIDDEN}@" + address.rpartition("@")[2]
    elif "@" in rest and "/" not in address:  # a password with a ? or # in it
        address = f"{HIDDEN}@"
    return scheme + address + (mark and mark + HIDDEN)
