"""Read files that a user names, whatever they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO

from dstrain.errors import UsageError

CONFIG_BYTES = 2**24
"""Bytes of the largest file of options, or configuration of a model."""


def read_limited(path: Path, most_bytes: int = CONFIG_BYTES) -> bytes:
    """Return the bytes of a file that `open_limited` opens; raises as it does."""
    with open_limited(path, most_bytes) as file:
        return file.read()


@contextmanager
def open_limited(path: Path, most_bytes: int) -> Iterator[IO[bytes]]:
    """Open a file that a user names; raises OSError.

    Raises UsageError before reading what is not a regular file, such as a pipe, which
    would never end, and for a file of more than `most_bytes`.
    """
    stat = path.stat()
    if not S_ISREG(stat.st_mode):
        raise UsageError(path, "is not a regular file")
    too_large = UsageError(path, f"has more than {most_bytes:,} bytes, the limit")
    if stat.st_size > most_bytes:
        raise too_large
    with path.open("rb") as file:
        if stat.st_size:
            yield file
            return
        # Some files of the system have no size and no end.
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise too_large
        yield BytesIO(content)
