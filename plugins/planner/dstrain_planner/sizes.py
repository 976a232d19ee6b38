"""Sizes of memory, as they are typed."""

import re
from types import MappingProxyType

from dstrain.plugin import UsageError

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
