"""Keeping secrets out of what is printed and written: tokens and passwords that can be known as such."""

import os
import re
import sys
from collections.abc import Iterator, Mapping

HIDDEN = "***"
SHORTEST = 8
"""Letters a variable's value must have to be taken for a secret: 'no' and '1' stand everywhere."""
WORDS = r"token(?!iz)|secret|passwor?d|api[_-]?key|access[_-]?key|credential|signature|authorization"
NAMES = rf"[\w-]*(?:{WORDS})[\w-]*"
NAMED = re.compile(rf"^(?:{NAMES})$", re.IGNORECASE)
SHAPES = (
    # A URL's user and password, or the token in their place.
    (re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]+:/{1,2})[^\s/@'\"]+@", re.IGNORECASE), rf"\g<keep>{HIDDEN}@"),
    # name=value in a query, and the like.
    (re.compile(rf"(?P<keep>[?&;]{NAMES}=)[^&;#\s'\"]+", re.IGNORECASE), rf"\g<keep>{HIDDEN}"),
    (re.compile(r"(?P<keep>[?&;](?:sig|key|auth)=)[^&;#\s'\"]+", re.IGNORECASE), rf"\g<keep>{HIDDEN}"),
    (re.compile(r"(?P<keep>\bBearer )[\w.~+/=-]{8,}"), rf"\g<keep>{HIDDEN}"),
    # Tokens of Hugging Face, ModelScope, GitHub, OpenAI and the like, Amazon, and JSON web tokens.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"\bms-[0-9a-f]{8}-[0-9a-f-]{20,}"), HIDDEN),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"), HIDDEN),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"), HIDDEN),
)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with '***' in place of every secret in it: values of variables named like one, and the known shapes."""
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
    found = {value for name, value in environment.items() if NAMED.match(name) and len(value) >= SHORTEST}
    yield from sorted(found, key=len, reverse=True)
