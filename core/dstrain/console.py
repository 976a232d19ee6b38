"""Lines and progress bars on stderr, with secrets removed."""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from tqdm import tqdm

SECONDS_PER_LINE = 60.0


class Progress:
    """Counts work done; a context manager. `total` and `done` are in the unit the title
    names.

    brief: what passes inside other work: its bar vanishes, and elsewhere than on a
    terminal its end is not told.
    """

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        enabled: bool = True,
        brief: bool = False,
    ) -> None:
        self.title, self.total, self.done, self.first, self.brief = (
            title,
            total,
            done,
            done,
            brief,
        )
        self.terminal = sys.stderr.isatty()
        self.enabled = enabled
        self.bar = tqdm(
            total=total,
            initial=done,
            desc=title,
            disable=not (enabled and self.terminal),
            file=sys.stderr,
            leave=not brief,
        )
        self.start = self.said = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled and not self.terminal and not self.brief and kind is None:
            self._say()
        self.bar.close()

    def step(self, note: str = "") -> None:
        """Count one more, with a note such as the loss."""
        self.done += 1
        if self.terminal:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
        elif self.enabled and time.monotonic() - self.said >= SECONDS_PER_LINE:
            self._say(note)

    def _say(self, note: str = "") -> None:
        now = time.monotonic()
        rate = (self.done - self.first) / max(now - self.start, 1e-9)
        left = (
            f", {clock((self.total - self.done) / rate)} left"
            if rate and self.done < self.total
            else ""
        )
        words = f"{self.title} {self.done}/{self.total}, {rate:.2f}/s{left}"
        print(f"{words} {note}".rstrip(), file=sys.stderr, flush=True)
        self.said = now


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
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
    """The text with '***' in place of every secret in it: values of variables named
    like one, and the known shapes.
    """
    for value in _values(os.environ if environment is None else environment):
        text = text.replace(value, HIDDEN)
    for shape, instead in SHAPES:
        text = shape.sub(instead, text)
    return text


def say(line: str) -> None:
    """Print a line on standard error without the secrets in it."""
    print(redacted(line), file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Print a warning on standard error without the secrets in it."""
    say(f"dstrain: warning: {line}")


def _values(environment: Mapping[str, str]) -> Iterator[str]:
    """The secrets of the environment, the longest first, so that none is left in part."""
    found = {
        value
        for name, value in environment.items()
        if NAMED.match(name) and len(value) >= SHORTEST
    }
    yield from sorted(found, key=len, reverse=True)


_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")


def shown(name: str) -> str:
    """A name as it may be shown and logged: a URL without what can hold a secret, any
    other name as it is.

    User and password, query and fragment of a URL are replaced by '***'.
    """
    found = _URL.match(name)
    if found is None:
        return name
    head, mark, tail = (*re.split(r"([?#])", name[found.end() :], maxsplit=1), "", "")[
        :3
    ]
    if "@" in head:
        head = f"{HIDDEN}@" + head.rpartition("@")[2]
    elif "@" in tail and "/" not in head:  # a password with a ? or # in it
        head = f"{HIDDEN}@"
    return f"{name[: found.end()]}{head}{mark and mark + HIDDEN}"
