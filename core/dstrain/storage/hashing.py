"""Digests of files and of JSON data, remembered between runs."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import write_json


def sha256(path: Path) -> str:
    """The sha256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


KEY_BYTES = 20
MARK_LENGTH = 4
"""Numbers in the mark of a file."""
SETTLED = 2 * 10**9
"""Nanoseconds after a change from which a file's times can be trusted: sooner, another
change may leave them equal.
"""


def hash_json(kind: str, content: Any) -> str:
    """The hash of JSON data of one kind, as hexadecimal text."""
    text = json.dumps(
        [kind, content], sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


@dataclass
class FileMemory:
    """JSON values computed from files, remembered until one of the files changes."""

    memory: Path | None = None
    """Where they are stored; None keeps them in this process alone."""
    known: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> the marks of its files (see `file_mark`), one after the other, then the value."""
    unsettled: set[str] = field(default_factory=set)
    changed: bool = False

    @classmethod
    def remembered(cls, memory: Path) -> Self:
        """Load what an earlier run stored; an unreadable memory is an empty one."""
        try:
            known = json.loads(memory.read_bytes())
        except (OSError, ValueError):
            known = None
        return cls(memory, known if isinstance(known, dict) else {})

    def recall(self, key: str, marks: list[int]) -> Any:
        """Return the value of a key, None if its files had other marks then."""
        entry = self.known.get(key)
        return entry[-1] if entry is not None and entry[:-1] == marks else None

    def remember(self, key: str, marks: list[int], value: Any) -> None:
        """Keep a value computed from files that had these marks before it was computed."""
        self.known[key] = [*marks, value]
        self.changed = True
        newest = max(*marks[1::MARK_LENGTH], *marks[2::MARK_LENGTH])
        if time.time_ns() - newest < SETTLED:
            self.unsettled.add(key)

    def save(self) -> None:
        """Store the values, if there is a place and something changed; raise SystemFault.

        Files that changed just now are left out.
        """
        if self.memory is None or not self.changed:
            return
        settled = {
            key: entry for key, entry in self.known.items() if key not in self.unsettled
        }
        write_json(self.memory, settled)
        self.changed = False


class Digests(FileMemory):
    """The sha256 of files, read again only where a file changed."""

    def of(self, path: str | Path) -> str:
        """Return the sha256 of a file's bytes."""
        marks = file_mark(path)
        digest = self.recall(str(path), marks)
        if digest is None:
            digest = sha256(Path(path))
            self.remember(str(path), marks, digest)
        return str(digest)

    def of_all(self, paths: Iterable[Path]) -> str:
        """One digest of several files, whatever their names, or of every file below a
        folder, with its place there.
        """
        return hash_json(
            "files", sorted([place, self.of(file)] for place, file in _files(paths))
        )

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was taken: what was
        read since is of no key.
        """
        for _, file in _files(paths):
            if self.known[str(file)][:-1] != file_mark(file):
                raise StateError(
                    str(file), "changed while it was in use", "run :data_process again"
                )


def file_mark(path: str | Path) -> list[int]:
    """What changes when a file does: size, times in nanoseconds, inode."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise SystemFault(str(path), f"cannot be read: {error.strerror}") from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Each file with its place below its folder ('' for a file given itself); hidden
    ones in folders are left out.
    """
    for path in paths:
        if not path.is_dir():
            yield "", path
            continue
        for file in sorted(path.rglob("*")):
            place = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in place.parts):
                yield place.as_posix(), file
