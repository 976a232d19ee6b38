"""Refuse, before anything is written, a folder that stage 1 must not make a feature cache
of: one with the user's files.
"""

import os
from pathlib import Path

from dstrain.cache import DIGESTS, MARKER
from dstrain.cache.store import LOG, PARTS, check_parts
from dstrain.errors import StateError, UsageError, first_few
from dstrain.runs.setup import Setup
from dstrain.storage import BAD_SAMPLES

REST = ("shards", "plans", LOG)
"""What stage 1 makes beside the marker before anything else."""
OF_SYSTEM = ("lost+found",)
"""What an empty file system has in it."""


def refuse_folder(setup: Setup) -> None:
    """Refuse a folder that stage 1 cannot fill, or would fill among the user's files.

    Raises UsageError for a folder that has anything in it and is no feature cache;
    StateError if stage 1 would replace a file of another program, or write to a place
    outside of the folder.
    """
    folder = setup.cache_path
    refuse_files(folder)
    if is_cache(folder):
        return
    flag = "--output_path" if setup.config.feature_cache is None else "--feature_cache"
    others = first_few(other_files(folder))
    if others:
        what = (
            f"{folder} is not empty and no feature cache: give an empty or new folder"
        )
        raise UsageError(flag, what, f"it contains {others}")


def refuse_files(folder: Path) -> None:
    """Raise StateError if stage 1 would replace a file in a folder that is not a cache,
    or write to a place outside of it.
    """
    check_parts(folder)
    if is_cache(folder):
        return
    for name in (BAD_SAMPLES, DIGESTS, LOG):
        if (folder / name).exists():
            raise StateError(
                folder,
                f"contains {name}, but is not a feature cache",
                "move it away, or give another --feature_cache",
            )


def is_cache(folder: Path) -> bool:
    """Return whether a folder is a feature cache, if one whose marker is gone."""
    # Without a marker, too: the advice for a damaged one is to delete it.
    return (folder / MARKER).exists() or all((folder / name).exists() for name in REST)


def other_files(folder: Path) -> list[str]:
    """Return the names of what is in a folder, if there is one, beside hidden files and
    the parts of a feature cache: a first start that was killed leaves some of these.
    Folders that are feature caches themselves are not listed either.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        # A file in its place is refused where the folder is locked.
        return []
    known = (*PARTS, *OF_SYSTEM)
    # dstrain's own locks, and what file managers and mounts leave, begin with a dot.
    others = [name for name in names if name not in known and not name.startswith(".")]
    return [name for name in others if not is_cache(folder / name)]
