"""Log lines and progress bars on stderr, with secrets removed."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

SECONDS_PER_LINE = 60.0
TIME_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of lines in a file."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose records hold no secrets.

    Every logger of dstrain gets the filter, since a filter of a parent does not see the
    records of its children; handlers of any program then see redacted text.
    """
    logger = logging.getLogger(name)
    logger.addFilter(RECORD_FILTER)
    return logger


class RecordFilter(logging.Filter):
    """Keeps the records of the main process, and removes secrets from them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message; return False in every process but the main one."""
        record.msg, record.args = redacted(record.getMessage()), ()
        return os.environ.get("RANK", "0") == "0"


RECORD_FILTER = RecordFilter()


class StderrHandler(logging.Handler):
    """Writes lines to stderr, above the progress bars that are open."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; information as it is, warnings marked as such."""
        from tqdm import tqdm  # late: it would be a sixth of the time of --help

        line = self.format(record)
        if record.levelno > logging.INFO:
            line = f"dstrain: {record.levelname.lower()}: {line}"
        tqdm.write(line, file=sys.stderr)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show what dstrain logs on stderr, once, as the command line does."""
    logger = logging.getLogger("dstrain")
    level, handlers = logger.level, list(logger.handlers)
    if not any(isinstance(handler, StderrHandler) for handler in handlers):
        logger.addHandler(StderrHandler())
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


class LogFile(logging.FileHandler):
    """A log file that is given up, silently, where the disk takes no more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a run does not fail for want of its log."""


@contextmanager
def logging_to_file() -> Iterator[Callable[[Path], None]]:
    """Yield a function that opens a log file, to which earlier lines are written too.

    An error that ends the block is logged there; showing it is for the caller.
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


class Progress:
    """A count of work done: a bar on a terminal, elsewhere a line a minute.

    Args:
        title: What is counted.
        total: The number of things to do.
        done: How many of them were done before.
        enabled: Whether to show anything; other processes than the main one do not.
        brief: Whether it passes inside other work: its bar vanishes at the end, and
            elsewhere than on a terminal no line says that it ended.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        enabled: bool = True,
        brief: bool = False,
    ) -> None:
        self.title = title
        self.total = total
        self.done = done
        self.first = done
        self.brief = brief
        self.terminal = sys.stderr.isatty()
        self.enabled = enabled
        from tqdm import tqdm

        self.bar = tqdm(
            total=total,
            initial=done,
            desc=title,
            disable=not (enabled and self.terminal),
            file=sys.stderr,
            leave=not brief,
            dynamic_ncols=True,
        )
        self.start = self.last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled and not self.terminal and not self.brief and kind is None:
            self._log()
        self.bar.close()

    def step(self, note: str = "") -> None:
        """Count one more, with a note such as the loss."""
        self.done += 1
        if self.terminal:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
        elif self.enabled and time.monotonic() - self.last_line >= SECONDS_PER_LINE:
            self._log(note)

    def _log(self, note: str = "") -> None:
        now = time.monotonic()
        rate = (self.done - self.first) / max(now - self.start, 1e-9)
        words = f"{self.title} {self.done}/{self.total}, {rate:.2f}/s"
        if rate and self.done < self.total:
            words += f", {clock((self.total - self.done) / rate)} left"
        logger.info(f"{words} {note}".rstrip())
        self.last_line = now


def clock(seconds: float) -> str:
    """Return seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


HIDDEN = "***"
SHORTEST = 8
"""Letters a variable's value must have to be taken for a secret: 'no' and '1' stand
everywhere.
"""
WORDS = r"token(?!iz)|secret|passwor?d|api[_-]?key|access[_-]?key|credential|signature|authorization"
NAMES = rf"[\w-]*(?:{WORDS})[\w-]*"
NAMED = re.compile(rf"^(?:{NAMES})$", re.IGNORECASE)
SHAPES = (
    # A URL's user and password, or the token in their place.
    (
        re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]+:/{1,2})[^\s/@'\"]+@", re.IGNORECASE),
        rf"\g<keep>{HIDDEN}@",
    ),
    # name=value in a query, and the like.
    (
        re.compile(rf"(?P<keep>[?&;]{NAMES}=)[^&;#\s'\"]+", re.IGNORECASE),
        rf"\g<keep>{HIDDEN}",
    ),
    (
        re.compile(r"(?P<keep>[?&;](?:sig|key|auth)=)[^&;#\s'\"]+", re.IGNORECASE),
        rf"\g<keep>{HIDDEN}",
    ),
    (re.compile(r"(?P<keep>\bBearer )[\w.~+/=-]{8,}"), rf"\g<keep>{HIDDEN}"),
    # Tokens of Hugging Face, ModelScope, GitHub, OpenAI and the like, Amazon, and JSON
    # web tokens.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"\bms-[0-9a-f]{8}-[0-9a-f-]{20,}"), HIDDEN),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"), HIDDEN),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"), HIDDEN),
)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the text with '***' in place of every secret in it.

    Secrets are the values of variables named like one, and texts of known forms.
    """
    for value in _values(os.environ if environment is None else environment):
        text = text.replace(value, HIDDEN)
    for shape, instead in SHAPES:
        text = shape.sub(instead, text)
    return text


def _values(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets of the environment, the longest first, so that none is left in part."""
    found = {
        value
        for name, value in environment.items()
        if NAMED.match(name) and len(value) >= SHORTEST
    }
    yield from sorted(found, key=len, reverse=True)


_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")


def shown(name: str) -> str:
    """Return a name as it may be logged: of a URL, only what cannot hold a secret.

    User and password, query and fragment of a URL are replaced by '***'.
    """
    found = _URL.match(name)
    if found is None:
        return name
    address = name[found.end() :]
    query = re.search(r"[?#]", address)
    end = query.start() if query else len(address)
    head, mark, tail = address[:end], address[end : end + 1], address[end + 1 :]
    if "@" in head:
        head = f"{HIDDEN}@" + head.rpartition("@")[2]
    elif "@" in tail and "/" not in head:  # a password with a ? or # in it
        head = f"{HIDDEN}@"
    return f"{name[: found.end()]}{head}{mark and mark + HIDDEN}"
