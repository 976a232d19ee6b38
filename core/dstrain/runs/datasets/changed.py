"""Say which files of a dataset were written after a run or stage 1 had read it: what a
digest of the whole cannot tell.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from dstrain.data.forms import Source, list_media
from dstrain.errors import first_few


def written_since(source: Source | None, then: Path) -> str:
    """Name the files that rows are read from and that were written after one of dstrain's files,
    in words; '' if there are none, as where files only came or went.

    Args:
        source: The dataset, if it is here.
        then: What was written when the dataset had been read.
    """
    if source is None or not then.exists():
        return ""
    end = then.stat().st_mtime
    found = [str(path) for path in _files(source) if _time(path) > end]
    return f"written since: {first_few(found)}" if found else ""


def _files(source: Source) -> Iterator[Path]:
    """Yield the files that decide which rows there are, and those of captions."""
    for part in source.parts:
        yield from _files(part)
    if source.form == "folder":
        for medium in list_media(source.path):
            for name in (medium.name, *medium.captions):
                yield source.path / name
    elif not source.parts:
        yield from source.files or (source.path,)


def _time(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
