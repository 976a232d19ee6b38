"""The source files of a plan: compared with what is on disk, a million in seconds."""

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from dstrain.cache.backend.plan_files import StoredPlan
from dstrain.data.videos import frames_in
from dstrain.storage import hash_json
from dstrain.storage.hashing import FileMark
from dstrain.storage.recorded_files import RecordedFile, first_changed

FILES_AT_ONCE = 512
SLOW = 1e-4
"""Seconds a look at a file takes where it is on a server: then many are asked at once."""
READERS = 16
T = TypeVar("T")


def are_as_recorded(plan: StoredPlan, samples: range, folders: Sequence[str]) -> bool:
    """Return whether each file that is recorded with samples of a plan is in the first of
    the folders that has its name, and was not touched; and each frame folder.
    """
    files = plan.files().of_samples(samples)
    roots = _roots(folders)

    def are_same(start: int) -> bool:
        marks = files.part(start, FILES_AT_ONCE).marks
        return all(_first_mark(name, roots) == mark for name, mark in marks)

    starts = range(0, len(files), FILES_AT_ONCE)
    return (
        all(_looked(are_same, starts))
        and _changed_folder(plan, samples, folders) is None
    )


def first_changed_source(
    plan: StoredPlan, samples: range, folders: Sequence[str]
) -> str | None:
    """Return the first file, or frame folder, of samples of a plan whose content is not the
    recorded one; one that is in none of the folders is passed over.

    Raises OSError for a file that cannot be read.
    """
    files = plan.files().of_samples(samples)
    roots = _roots(folders)

    def touched(start: int) -> list[RecordedFile]:
        part = files.part(start, FILES_AT_ONCE)
        found: list[RecordedFile] = []
        for number, (name, mark) in enumerate(part.marks):
            if _first_mark(name, roots) == mark or _leads_out(os.fsdecode(name)):
                continue
            places = filter(os.path.isfile, (root + name for root in roots))
            for place in islice(places, 1):
                found.append((os.fsdecode(place), [*mark, part.digest(number).hex()]))
        return found

    # Most files are as they were: one look at each is all that they cost.
    starts = range(0, len(files), FILES_AT_ONCE)
    changed = first_changed(chain.from_iterable(_looked(touched, starts)))
    return changed or _changed_folder(plan, samples, folders)


def _changed_folder(
    plan: StoredPlan, samples: range, folders: Sequence[str]
) -> str | None:
    """Return the first frame folder with other names of frames than the plan recorded."""
    for name, digest in plan.frame_folders(samples):
        if _leads_out(name):
            continue
        places = [Path(folder, name) for folder in folders]
        place = next(filter(Path.is_dir, places), None)
        if place is not None and names_digest(place) != digest:
            return str(place)
    return None


def names_digest(folder: Path) -> str:
    """Return the digest of the names of frames in a folder: a frame more, or less, makes
    other clips.
    """
    return hash_json("frames", [file.name for file in frames_in(folder)])


def _roots(folders: Sequence[str]) -> list[bytes]:
    # Names stay bytes: a million of them are turned into text for nothing.
    return [os.fsencode(os.path.join(folder, "")) for folder in folders]


def _first_mark(name: bytes, roots: Sequence[bytes]) -> FileMark | None:
    """Return the mark of a file in the first folder that has it; None of what is no file."""
    for root in roots:
        try:
            found = os.stat(root + name)
        except (OSError, ValueError):
            continue
        if not stat.S_ISREG(found.st_mode):
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return None


def _looked(look: Callable[[int], T], starts: Sequence[int]) -> Iterator[T]:
    if not starts:
        return
    since = time.monotonic()
    yield look(starts[0])
    if time.monotonic() - since < SLOW * FILES_AT_ONCE:
        # Threads would take turns: a file that is here is looked at in a microsecond.
        yield from map(look, starts[1:])
        return
    with ThreadPoolExecutor(READERS) as threads:
        yield from threads.map(look, starts[1:])


def _leads_out(name: str) -> bool:
    """Return whether a recorded name leads out of its folder: a stranger wrote it."""
    return os.path.isabs(name) or (".." in name and ".." in Path(name).parts)
