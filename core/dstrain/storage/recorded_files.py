"""Compare files with what was recorded of them."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.console import get_logger
from dstrain.storage.hashing import file_mark, sha256

logger = get_logger(__name__)
READERS = 16
"""Threads that look at files: more than processors, since they wait for a disk."""
FILES_PER_TASK = 512
LONG_READ = 2**30
"""Bytes that take a second or more to read, so that this is said."""
RecordedFile = tuple[str, Sequence[Any]]
"""A path, and what `Digests.record` returned of the file when it was recorded."""


def first_changed(files: Iterable[RecordedFile]) -> str | None:
    """Return the first file whose content is not the recorded one; a file that is not
    there is passed over.

    Raises OSError for a file that cannot be read.
    """
    remaining = iter(files)
    parts = iter(lambda: list(islice(remaining, FILES_PER_TASK)), [])
    touched: list[tuple[str, str]] = []
    with ThreadPoolExecutor(READERS) as threads:
        for part in threads.map(_touched, parts):
            for path, digest in part:
                if not digest:
                    return path
                touched.append((path, digest))
        size = sum(Path(path).stat().st_size for path, _ in touched)
        if size >= LONG_READ:
            changed = (
                f"files whose times are not those recorded, such as {touched[0][0]}"
            )
            logger.info(f"comparing {size / 2**30:.1f} GiB of {changed}")
        digests = threads.map(sha256, [Path(path) for path, _ in touched])
        for (path, recorded), digest in zip(touched, digests, strict=True):
            if digest != recorded:
                threads.shutdown(cancel_futures=True)
                return path
    return None


def _touched(files: Iterable[RecordedFile]) -> list[tuple[str, str]]:
    """Return the files whose mark is not the recorded one, each with its recorded
    sha256; with '' if another size says enough.
    """
    found = []
    for path, (*recorded, digest) in files:
        if not os.path.isfile(path):
            continue
        size, modified, changed, inode = map(int.__eq__, file_mark(path), recorded)
        # A copy keeps no more than the time of the content. But where one inode was
        # changed since, that time may have been set back.
        if not size:
            found.append((path, ""))
        elif not modified or (inode and not changed):
            found.append((path, digest))
    return found
