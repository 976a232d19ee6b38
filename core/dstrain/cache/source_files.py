"""The source files of a plan: compared with what is on disk, a million in seconds."""

import os
import stat
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrain.cache.plan_files import open_part
from dstrain.storage.hashing import MARK_LENGTH, first_changed

FILES_AT_ONCE = 512
SLOW = 1e-4
"""Seconds a look at a file takes where it is on a server: then many are asked at once."""
READERS = 16
ABSENT = -1
IS_REGULAR_MASK = stat.S_IFMT(0xFFFF)
"""The bits of a mode that say what kind of file it is."""
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

    def of_samples(self, samples: range) -> "SourceFiles":
        """Return the files that are recorded with these samples."""
        return SourceFiles(_of_samples(self.table, samples))

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
            # As `first_changed` does: a copy keeps no more than the time of the content.
            other = ~size | ~modified | (inode & ~changed)
            for number in np.flatnonzero(other & (found[:, 0] >= 0)).tolist():
                digest = self._part(at).column("sha256")[number].as_py().hex()
                entry = [*marks[number].tolist(), digest]
                touched.append((paths.path(number), entry))
        return first_changed(touched)

    def _parts(
        self, folders: Sequence[str], trusts: bool
    ) -> Iterator[tuple[slice, "_Paths", Marks]]:
        """Yield parts of the files: their numbers, paths and marks.

        A name that leads out of the folders was written by a stranger, unless the caller
        trusts it; it is left out.
        """

        roots = [os.fsencode(os.path.join(folder, "")) for folder in folders]

        def look(start: int) -> tuple[slice, _Paths, Marks]:
            # Names stay bytes: a million of them are turned into text for nothing.
            part = self.table.slice(start, FILES_AT_ONCE)
            names: list[bytes] = part.column("place").to_pylist()
            if not trusts:
                names = _without_leading_out(names)
            found = marks_of(names, roots[0])
            places = np.zeros(len(names), np.intp)
            for root in range(1, len(roots)):
                absent = np.flatnonzero(found[:, 0] < 0)
                if not len(absent):
                    break
                found[absent] = marks_of([names[n] for n in absent], roots[root])
                places[absent] = root
            return slice(start, start + len(names)), _Paths(names, roots, places), found

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


@dataclass(frozen=True)
class _Paths:
    """The paths of some files, made when they are asked for."""

    names: Sequence[bytes]
    roots: Sequence[bytes]
    places: NDArray[np.intp]
    """The root that each is in."""

    def path(self, number: int) -> str:
        """Return the path of one."""
        return os.fsdecode(self.roots[self.places[number]] + self.names[number])


def marks_of(names: Sequence[bytes], root: bytes = b"") -> Marks:
    """Return the mark of each file.

    Args:
        names: Their names in a folder.
        root: The folder, with a separator at its end.
    """
    found: list[os.stat_result] = []
    absent: list[int] = []
    with _opened(root) as folder:
        start = b"" if folder is not None else root
        look, add = os.stat, found.append
        for number, name in enumerate(names):
            try:
                add(look(start + name, dir_fd=folder))
            except (OSError, ValueError):
                absent.append(number)
    numbers = [
        part
        for one in found
        for part in (one.st_mode, one.st_size, one.st_mtime_ns, one.st_ctime_ns)
    ]
    # Arrays of Python take numbers faster than those of numpy.
    rows = np.frombuffer(array("q", numbers), np.int64).reshape(-1, MARK_LENGTH)
    mode, *of_files = rows.T
    # An inode has 64 bits.
    inodes = np.frombuffer(array("Q", [one.st_ino for one in found]), np.int64)
    marks = np.stack([*of_files, inodes], axis=1)
    marks[mode & IS_REGULAR_MASK != stat.S_IFREG] = ABSENT
    # Those that were not found count from the first that is left out.
    return np.insert(
        marks, np.array(absent, np.intp) - np.arange(len(absent)), -1, axis=0
    )


@contextmanager
def _opened(root: bytes) -> Iterator[int | None]:
    """Yield a descriptor of a folder, so that the system walks its path but once; None
    where that is not possible.
    """
    descriptor = None
    if root and os.stat in os.supports_dir_fd:
        # One that may be searched and not read can be opened as a path alone.
        flags = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
        with suppress(OSError):
            descriptor = os.open(root, flags)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _of_samples(table: Any, samples: range) -> Any:
    """Return the lines of a table, in the order of their samples, that are of these."""
    numbers = table.column("sample").to_numpy()
    start, stop = numbers.searchsorted([samples.start, samples.stop]).tolist()
    return table.slice(start, stop - start)


def frame_folders(
    folder: Path, record: Mapping[str, Any], samples: range | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the frame folders of a plan, or those recorded with some samples, each with
    the digest of its names; raises StateError if they are damaged or missing.
    """
    table = open_part(folder, record, "folders")
    if samples is not None:
        table = _of_samples(table, samples)
    for batch in table.to_batches():
        places = batch.column("place").to_pylist()
        for place, names in zip(places, batch.column("names").to_pylist(), strict=True):
            yield os.fsdecode(place), names.hex()


def _without_leading_out(names: list[bytes]) -> list[bytes]:
    """Return the names, with b"" in place of those that lead out of their folder."""
    # One look at all of them, which nearly always is enough.
    together = b"\0" + b"\0".join(names)
    if b"\0/" not in together and b".." not in together:
        return names
    return [b"" if _leads_out(os.fsdecode(name)) else name for name in names]


def _leads_out(name: str) -> bool:
    return os.path.isabs(name) or (".." in name and ".." in Path(name).parts)
