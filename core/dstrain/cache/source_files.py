"""The source files of a plan: compared with what is on disk, a million in seconds."""

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.cache.plan_files import open_part
from dstrain.storage.hashing import FileMark
from dstrain.storage.recorded_files import RecordedFile, first_changed

FILES_AT_ONCE = 512
SLOW = 1e-4
"""Seconds a look at a file takes where it is on a server: then many are asked at once."""
READERS = 16


@dataclass(frozen=True)
class SourceFiles:
    """The files that a plan's values were computed from."""

    table: Any
    """A `pyarrow.Table` over mapped memory, read in slices."""

    @classmethod
    def open(cls, folder: Path, record: Mapping[str, Any]) -> "SourceFiles":
        """Open those of a plan; raises StateError if they are damaged or missing."""
        return cls(open_part(folder, record, "files"))

    def of_samples(self, samples: range) -> "SourceFiles":
        """Return the files that are recorded with these samples."""
        return SourceFiles(_of_samples(self.table, samples))

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.table)

    def are_as_recorded(self, folders: Sequence[str]) -> bool:
        """Return whether each is in the first of the folders that has its name, and was
        not touched.
        """
        roots = _roots(folders)

        def are_same(start: int) -> bool:
            part = self.table.slice(start, FILES_AT_ONCE)
            found = [_first_mark(name, roots) for name in part["place"].to_pylist()]
            return found == _marks(part)

        return all(_looked(are_same, range(0, len(self), FILES_AT_ONCE)))

    def first_changed(self, folders: Sequence[str]) -> str | None:
        """Return the first whose content is not the recorded one; one that is in none of
        the folders is passed over.

        Raises OSError for a file that cannot be read.
        """
        return first_changed(self._here(_roots(folders)))

    def _here(self, roots: Sequence[bytes]) -> Iterator[RecordedFile]:
        """Yield the files that are in one of the folders, with what is recorded of them."""
        for start in range(0, len(self), FILES_AT_ONCE):
            part = self.table.slice(start, FILES_AT_ONCE)
            names, digests = part["place"].to_pylist(), part["sha256"].to_pylist()
            for name, mark, digest in zip(names, _marks(part), digests, strict=True):
                if leads_out(os.fsdecode(name)):
                    continue
                places = (root + name for root in roots)
                for place in filter(os.path.isfile, places):
                    yield os.fsdecode(place), [*mark, digest.hex()]
                    break


def _roots(folders: Sequence[str]) -> list[bytes]:
    # Names stay bytes: a million of them are turned into text for nothing.
    return [os.fsencode(os.path.join(folder, "")) for folder in folders]


def _marks(part: Any) -> list[FileMark]:
    """Return the recorded marks of files, as `file_mark` has them."""
    names = ("size", "modified", "changed", "inode")
    columns = (part[name].to_pylist() for name in names)
    return [list(mark) for mark in zip(*columns, strict=True)]


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


def _looked(look: Callable[[int], bool], starts: Sequence[int]) -> Iterator[bool]:
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


def _of_samples(table: Any, samples: range) -> Any:
    """Return the lines of a table, in the order of their samples, that are of these."""
    numbers = table.column("sample").to_numpy()
    start, stop = numbers.searchsorted([samples.start, samples.stop]).tolist()
    return table.slice(start, stop - start)


def frame_folders(
    folder: Path, record: Mapping[str, Any], samples: range
) -> Iterator[tuple[str, str]]:
    """Yield the frame folders that are recorded with some samples of a plan, each with
    the digest of its names; raises StateError if they are damaged or missing.
    """
    table = _of_samples(open_part(folder, record, "folders"), samples)
    for batch in table.to_batches():
        places = batch.column("place").to_pylist()
        for place, names in zip(places, batch.column("names").to_pylist(), strict=True):
            yield os.fsdecode(place), names.hex()


def leads_out(name: str) -> bool:
    """Return whether a recorded name leads out of its folder: a stranger wrote it."""
    return os.path.isabs(name) or (".." in name and ".." in Path(name).parts)
