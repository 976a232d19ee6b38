"""The source files of a plan: compared with what is on disk, a million in seconds."""

import os
import stat
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.plan_files import open_part
from dstrain.storage.hashing import MARK_LENGTH
from dstrain.storage.recorded_files import first_changed

FILES_AT_ONCE = 512
SLOW = 1e-4
"""Seconds a look at a file takes where it is on a server: then many are asked at once."""
READERS = 16
ABSENT = (-1,) * MARK_LENGTH
Marks = NDArray[np.int64]
"""Size, times and inode of files, (files, 4), as `file_mark` has them; -1 of what is no
file."""


@dataclass(frozen=True)
class SourceFiles:
    """The files that a plan's values were computed from."""

    table: Any
    """A `pyarrow.Table` over mapped memory, read in slices."""

    @classmethod
    def open(cls, folder: Path, record: Mapping[str, Any]) -> "SourceFiles":
        """Open those of a plan; raises StateError if they are damaged or missing."""
        return cls(open_part(folder, record, "files"))

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.table)

    def marks(self, part: slice) -> Marks:
        """Return the recorded marks of some of the files."""
        table = self._part(part)
        columns = [
            # An inode has 64 bits; what matters is that equal ones are equal.
            table.column(name).to_numpy().astype(np.int64)
            for name in ("size", "modified", "changed", "inode")
        ]
        return np.stack(columns, axis=1)

    def _part(self, part: slice) -> Any:
        return self.table.slice(part.start, part.stop - part.start)

    def are_as_recorded(self, folders: Sequence[str]) -> bool:
        """Return whether each is in the first of the folders that has its name, and was
        not touched.
        """
        parts = self._parts(folders, trusts=True)
        return all(np.array_equal(self.marks(at), found) for at, _, found in parts)

    def first_changed(self, folders: Sequence[str]) -> str | None:
        """Return the first whose content is not the recorded one; one that is in none of
        the folders is passed over.

        Raises OSError for a file that cannot be read.
        """
        touched: list[tuple[str, Sequence[Any]]] = []
        for at, paths, found in self._parts(folders, trusts=False):
            marks = self.marks(at)
            size, modified, changed, inode = (found == marks).T
            # As `recorded_files` does: a copy keeps no more than the time of the content.
            other = ~size | ~modified | (inode & ~changed)
            for number in np.flatnonzero(other & (found[:, 0] >= 0)).tolist():
                digest = self._part(at).column("sha256")[number].as_py().hex()
                entry = [*marks[number].tolist(), digest]
                touched.append((os.fsdecode(paths[number]), entry))
        return first_changed(touched)

    def _parts(
        self, folders: Sequence[str], trusts: bool
    ) -> Iterator[tuple[slice, list[bytes], Marks]]:
        """Yield parts of the files: their numbers, paths and marks.

        A name that leads out of the folders was written by a stranger, unless the caller
        trusts it; it is left out.
        """

        roots = [os.fsencode(os.path.join(folder, "")) for folder in folders]

        def look(start: int) -> tuple[slice, list[bytes], Marks]:
            # Names stay bytes, and paths are made by adding: a million of each.
            part = self.table.slice(start, FILES_AT_ONCE)
            names: list[bytes] = part.column("place").to_pylist()
            if not trusts:
                names = _without_leading_out(names)
            paths = [_within(roots[0], name) for name in names]
            found = marks_of(paths)
            for root in roots[1:]:
                for number in np.flatnonzero(found[:, 0] < 0).tolist():
                    path = _within(root, names[number])
                    (mark,) = marks_of([path])
                    if mark[0] >= 0:
                        paths[number], found[number] = path, mark
            return slice(start, start + len(names)), paths, found

        return _looked(look, range(0, len(self), FILES_AT_ONCE))


def _looked(look: Any, starts: Sequence[int]) -> Iterator[Any]:
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


def marks_of(paths: Iterable[str | bytes]) -> Marks:
    """Return the mark of each file."""
    numbers = array("q")
    look, is_regular, add = os.stat, stat.S_ISREG, numbers.extend
    for path in paths:
        try:
            found = look(path)
        except (OSError, ValueError):
            add(ABSENT)
            continue
        if not is_regular(found.st_mode):
            add(ABSENT)
            continue
        inode = found.st_ino
        if inode >= 2**63:
            inode -= 2**64
        add((found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode))
    return np.frombuffer(numbers, np.int64).reshape(-1, MARK_LENGTH).copy()


def frame_folders(folder: Path, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the frame folders of a plan, each with the digest of its names; raises
    StateError if they are damaged or missing.
    """
    table = open_part(folder, record, "folders")
    for batch in table.to_batches():
        places = batch.column("place").to_pylist()
        for place, names in zip(places, batch.column("names").to_pylist(), strict=True):
            yield os.fsdecode(place), names.hex()


def _within(root: bytes, name: bytes) -> bytes:
    """Return the path of a name in a folder, as `os.path.join` does."""
    return name if name.startswith(b"/") else root + name


def _without_leading_out(names: list[bytes]) -> list[bytes]:
    """Return the names, with b"" in place of those that lead out of their folder."""
    # One look at all of them, which nearly always is enough.
    together = b"\0" + b"\0".join(names)
    if b"\0/" not in together and b".." not in together:
        return names
    return [b"" if _leads_out(os.fsdecode(name)) else name for name in names]


def _leads_out(name: str) -> bool:
    return os.path.isabs(name) or (".." in name and ".." in Path(name).parts)
