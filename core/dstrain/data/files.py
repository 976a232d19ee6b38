"""Files that a data set names: found inside its folders or fetched, and measured by
their headers before a run.
"""

import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePosixPath

from dstrain.console import shown
from dstrain.data.cells import file_names
from dstrain.data.images import read_size
from dstrain.data.metadata import Table
from dstrain.data.urls import UrlCache, is_url, remove_abandoned
from dstrain.data.videos import Video, probe
from dstrain.errors import UsageError
from dstrain.graph.inputs import Column

HEADER_READERS = 16
"""Threads that read headers; more than processors, because they wait for the disk or
the network.
"""


@dataclass(frozen=True)
class DataRoots:
    """Where the files of a data set may lie: real paths of folders, and the cache of
    files named by URL.

    Relative names are looked for in each folder. Hard links are files like any other:
    nothing tells them apart.
    """

    folders: tuple[str, ...]
    urls: UrlCache | None = None
    listed: Callable[[str], Mapping[str, str]] = field(
        default_factory=lambda: cache(_listed), compare=False
    )

    @classmethod
    def of(
        cls, base: Path, roots: Iterable[Path], url_cache: Path | None
    ) -> "DataRoots":
        """The places that the data set's flags name; raises UsageError for what is no
        folder.
        """
        flags = [
            ("--dataset_base_path", base),
            *(("--dataset_root", root) for root in roots),
        ]
        for flag, folder in flags:
            if not folder.is_dir():
                raise UsageError(flag, f"{folder} is not a folder")
        folders = tuple(dict.fromkeys(os.path.realpath(folder) for _, folder in flags))
        if url_cache is None:
            return cls(folders)
        remove_abandoned(url_cache)
        return cls(folders, UrlCache(url_cache))

    def find(self, name: str) -> str:
        """The real path of a file; raises UsageError for one that lies elsewhere, or in
        two places.
        """
        if is_url(name):
            if self.urls is None:
                raise UsageError(
                    name,
                    "is a URL; --url_cache DIR fetches such files and keeps them there",
                )
            return str(self.urls.fetch(name))
        found: dict[str, None] = {}
        outside = ""
        for folder in self.folders:
            written = os.path.join(folder, name)
            path = os.path.realpath(written)
            if not self.contains(path):
                outside = outside or path
            elif _exists(written):
                found[path] = None
        if len(found) > 1:
            raise UsageError(name, f"is there more than once: {' and '.join(found)}")
        if not found and outside:
            raise self._outside(name, outside)
        if not found:
            raise FileNotFoundError(name)
        return next(iter(found))

    def contains(self, path: str) -> bool:
        """Whether a real path is one of the folders or lies below one."""
        return any(
            os.path.join(path, "").startswith(os.path.join(folder, ""))
            for folder in self.folders
        )

    def nearest(self, name: str) -> str:
        """Return "; did you mean 'x'?" for a file of another letter case, or without
        the folders before it.
        """
        parts = PurePosixPath(name).parts
        for wanted in (parts[start:] for start in range(len(parts))):
            for folder in self.folders:
                found: list[str] = []
                for part in wanted:
                    below = os.path.join(folder, *found)
                    there = (
                        self.listed(below)
                        if self.contains(os.path.realpath(below))
                        else {}
                    )
                    found += [there[_folded(part)]] if _folded(part) in there else []
                if len(found) == len(wanted):
                    return f"; did you mean {os.path.join(*found)!r}?"
        return ""

    def check_frames(self, folder: str) -> None:
        """Raise UsageError if something in a folder of frames leads elsewhere; nothing
        of it was opened before.
        """
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = os.path.realpath(entry.path)
                if not entry.name.startswith(".") and not self.contains(path):
                    raise self._outside(entry.path, path)

    def _outside(self, name: str, path: str) -> UsageError:
        folders = "folder" if len(self.folders) == 1 else "folders"
        return UsageError(name, f"leads out of the data set's {folders}, to {path}")


def _folded(name: str) -> str:
    """A name without what two file systems may write differently: letter case, and
    accents apart or joined.
    """
    return unicodedata.normalize("NFC", name).casefold()


def _listed(folder: str) -> dict[str, str]:
    """The names in a folder, by what they are folded to; none where there is no folder."""
    try:
        return {_folded(name): name for name in sorted(os.listdir(folder))}
    except OSError:
        return {}


def _exists(path: str) -> bool:
    try:
        os.stat(path)  # of the path as written: 'a.png/' is no file
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@dataclass(frozen=True)
class ImageFile:
    """A picture as told by its header; size: (height, width)."""

    path: str
    size: tuple[int, int]


@dataclass(frozen=True)
class VideoFile:
    """A video as told by its packets."""

    path: str
    video: Video


Name = tuple[str, bool]
"""A file as written in the metadata, and whether it is read as a video."""
FileInfos = Mapping[Name, ImageFile | VideoFile | str]
"""What each file was found to be, or what is wrong with it."""


def inspect_files(
    table: Table,
    columns: Iterable[Column],
    base: Path,
    roots: Iterable[Path],
    cache: Path | None,
) -> FileInfos:
    """Find each file named in these columns once, fetch it if need be, and read its
    header, or packets.
    """
    names: dict[Name, None] = {}
    for column in columns:
        if column.is_file:
            for row in table.rows:
                try:
                    named = file_names(row[column.name], column)
                except ValueError:
                    continue  # reported with its row
                names.update(dict.fromkeys((name, column.from_video) for name in named))
    if not names:
        return {}
    places = DataRoots.of(base, roots, cache)
    with ThreadPoolExecutor(HEADER_READERS) as readers:
        return dict(
            zip(names, readers.map(partial(_inspect, places), names), strict=True)
        )


def _inspect(places: DataRoots, named: Name) -> ImageFile | VideoFile | str:
    """Find a file and read its header; what is wrong with it is said, with its name,
    and not raised.
    """
    name, is_video = named
    path = ""
    try:
        path = places.find(name)
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not (is_video and stat.S_ISDIR(mode)):
            return f"{shown(name)!r} is not a regular file{' or a folder of frames' if is_video else ''}"
        if not is_video:
            return ImageFile(path, read_size(Path(path)))
        if stat.S_ISDIR(mode):
            places.check_frames(path)
        return VideoFile(path, probe(Path(path)))
    except FileNotFoundError:
        return f"no such file {name!r}{places.nearest(name)}"
    except UsageError as error:
        part = f": {Path(error.where).name}" if path and error.where != path else ""
        kept = f"; remove {path} to fetch it again" if path and is_url(name) else ""
        return f"{shown(name)!r}{part} {error.what}{kept}"
    except (OSError, ValueError) as error:
        return f"{shown(name)!r} cannot be read: {getattr(error, 'strerror', None) or error}"
