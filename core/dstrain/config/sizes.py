"""Parse sizes of memory, and write them."""

import re
from types import MappingProxyType

from dstrain.errors import UsageError

UNITS = MappingProxyType(
    {"": 10**9, "GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20}
)
"""Unit -> its bytes. The least that a name of a card may mean: one of '24 GB' has at
least 24 * 10**9."""


def parse_size(flag: str, text: str) -> int:
    """Return the bytes of '24GB', '24GiB' or '24', which is in GB.

    Raises UsageError, naming the flag, for anything else and for nothing.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)", text.strip())
    unit = UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if not size:
        what = f"expected a size such as 24GB, 24GiB or 24, got {text!r}"
        raise UsageError(flag, what)
    return size


def as_size(size: float) -> str:
    """Write bytes for people: '38.06 GiB', '512.0 MiB', '3.1 KiB'."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20 / 10:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def parse_resolutions(text: str | None) -> tuple[int, ...]:
    """Return the sides in pixels that a value such as 512,768 names; () for None.

    Raises UsageError for what is none, and for one that is named twice.
    """
    if text is None:
        return ()
    return _numbers("--resolution", text, "pixels, such as 1024")


def parse_frames(value: int | str) -> tuple[int, ...]:
    """Return the numbers of frames that a value such as 81 or 17,33,49 names, the least
    first.

    Raises UsageError for what is none, and for one that is named twice.
    """
    found = _numbers("--num_frames", str(value), "frames, such as 81")
    return tuple(sorted(found))


def _numbers(flag: str, text: str, noun: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        name = word.strip()
        if not (name.isascii() and name.isdigit()) or int(name) < 1:
            what = f"expected a number of {noun}, or several, comma-separated, got {text!r}"
            raise UsageError(flag, what)
        if int(name) in found:
            raise UsageError(flag, f"{name} is named twice")
        found.append(int(name))
    return tuple(found)
