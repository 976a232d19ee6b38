"""List the images and videos of a folder with the files that have their captions."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dstrain.data.damage.faults import raise_system_fault
from dstrain.data.forms.captions import SUFFIXES as CAPTIONS
from dstrain.errors import SystemFault, UsageError
from dstrain.storage.hashing import FileMemory, file_mark, sha256
from dstrain.storage.user_cache import user_cache

IMAGES = frozenset(
    {
        *(".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jfif", ".pgm", ".png", ".pnm"),
        *(".ppm", ".tif", ".tiff", ".webp"),
    }
)
VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"})
MEDIA = IMAGES | VIDEOS
MEMORY = "caption_folders.json"
"""Remembers the digests of folders for all runs of a user."""


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video of a folder; names are relative to it, with '/'."""

    name: str
    captions: tuple[str, ...]
    """The files that may have its caption, those that count most first."""
    twins: tuple[str, ...]
    """Others, of the same name but its ending, whose caption it would be, too."""


def has_media(folder: Path) -> bool:
    """Return whether there is an image or a video in a folder, or below it."""
    return any(True for _ in list_media(folder))


def list_media(
    folder: Path, suffixes: Collection[str] = MEDIA, marks: "Marks | None" = None
) -> Iterator[Medium]:
    """Yield the images and videos in a folder and below it, in the order of the bytes of
    their names; what is hidden is left out.

    Raises UsageError for a link to a folder, SystemFault for a folder that cannot be read.

    Args:
        folder: The folder.
        suffixes: The endings of files that are listed.
        marks: Gets the files with captions.
    """
    yield from _list(folder, "", suffixes, marks)


def _list(
    folder: Path, prefix: str, suffixes: Collection[str], marks: "Marks | None"
) -> Iterator[Medium]:
    names = _names_in(folder / prefix if prefix else folder)
    # The list is sorted; among these a file is looked up.
    known = set(names)
    for name in names:
        if name.endswith("/"):
            yield from _list(folder, prefix + name, suffixes, marks)
            continue
        stem, suffix = os.path.splitext(name)
        if suffix.lower() not in suffixes:
            continue
        captions = [prefix + one for one in _having(stem, CAPTIONS, known)]
        twins = [prefix + one for one in _having(stem, suffixes, known) if one != name]
        if marks is not None:
            for one in captions:
                marks.add(folder, one)
        yield Medium(prefix + name, tuple(captions), tuple(sorted(twins)))


def _having(stem: str, suffixes: Collection[str], names: Collection[str]) -> list[str]:
    """Return the names that are a stem with one of these endings, in small letters or in
    capitals.
    """
    wanted = (stem + one for suffix in suffixes for one in (suffix, suffix.upper()))
    return [name for name in wanted if name in names]


def _names_in(folder: Path) -> list[str]:
    """Return the names of files in a folder, and of folders with '/' at the end, sorted."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    names.append(entry.name)
                elif entry.is_symlink():
                    # It may lead anywhere, and around in a circle.
                    what = "is a link to a folder, which is not followed"
                    advice = "put the folder itself there, or move the link away"
                    raise UsageError(folder / entry.name, what, advice)
                else:
                    names.append(f"{entry.name}/")
    except OSError as error:
        raise_system_fault(folder, error)
        raise SystemFault(folder, f"cannot be read: {error.strerror}") from error
    names.sort(key=os.fsencode)
    return names


class Marks:
    """What changes with any of many files: one mark for all of them."""

    def __init__(self) -> None:
        """Begin without files."""
        self._count = 0
        self._newest = [0, 0]
        self._hash = hashlib.blake2b(digest_size=7)

    def add(self, folder: Path, name: str) -> None:
        """Add a file; one that is gone, or a broken link, has no times."""
        try:
            mark = file_mark(folder / name)
        except OSError:
            mark = [0, 0, 0, 0]
        self._count += 1
        self._newest = [max(pair) for pair in zip(self._newest, mark[1:3], strict=True)]
        self.add_text(f"{name}\0{mark}")

    def add_text(self, text: str) -> None:
        """Add a text."""
        self._hash.update(os.fsencode(text) + b"\0")

    @property
    def mark(self) -> list[int]:
        """Return a mark as `file_mark` has it, whose inode is a hash of all of them."""
        number = int.from_bytes(self._hash.digest(), "big")
        return [self._count, *self._newest, number]


def folder_digest(folder: Path) -> str:
    """Return the digest of the names of images and videos in a folder, and of the names
    and the bytes of the files with their captions.

    It does not change where the folder is copied or moved. Captions are read again only
    if a file has another mark. Raises as `list_media`.
    """
    marks = Marks()
    for medium in list_media(folder, marks=marks):
        marks.add_text(medium.name)
    cache = user_cache()
    memory = FileMemory((cache or Path(os.devnull)) / MEMORY)
    key = os.path.realpath(folder)
    found = memory.recall(key, marks.mark)
    if found is None:
        found = _content_digest(folder, sha256)
        memory.remember(key, marks.mark, found)
        if cache is not None:
            _save(memory)
    return str(found)


def _save(memory: FileMemory) -> None:
    """Store the digests of folders that are still there; where that is not possible,
    nothing is remembered.
    """
    memory.known = {
        key: entry for key, entry in memory.known.items() if os.path.isdir(key)
    }
    try:
        memory.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory.save()
    except (SystemFault, OSError):
        return


def _content_digest(folder: Path, digest_of: Callable[[Path], str]) -> str:
    whole = hashlib.sha256(b"folder of images and videos, form 1\0")
    for medium in list_media(folder):
        whole.update(os.fsencode(medium.name) + b"\0")
        for name in medium.captions:
            try:
                digest = digest_of(folder / name)
            except OSError as error:
                raise_system_fault(folder / name, error)
                digest = ""
            whole.update(os.fsencode(name) + b"\0" + digest.encode() + b"\0")
    return whole.hexdigest()
