"""Digests of files and of JSON data, remembered between runs."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import write_json


def sha256(path: Path) -> str:
    """The sha256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


KEY_BYTES = 20
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
class Digests:
    """sha256 of files, remembered in `memory` by path, size, times of modification and
    change, and inode.
    """

    memory: Path | None = None
    known: dict[str, list[Any]] = field(default_factory=dict)
    unsettled: set[str] = field(default_factory=set)
    changed: bool = False

    @classmethod
    def remembered(cls, memory: Path) -> "Digests":
        """Read what an earlier run remembered; an unreadable memory is an empty one."""
        try:
            known = json.loads(memory.read_bytes())
        except (OSError, ValueError):
            known = None
        return cls(memory, known if isinstance(known, dict) else {})

    def of(self, path: str | Path) -> str:
        """The sha256 of a file's bytes, read again only if the file changed."""
        mark = file_mark(path)
        entry = self.known.get(str(path))
        if entry is None or entry[:-1] != mark:
            entry = [*mark, sha256(Path(path))]
            self.known[str(path)] = entry
            self.changed = True
            if time.time_ns() - max(mark[1:3]) < SETTLED:
                self.unsettled.add(str(path))
        return str(entry[-1])

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

    def save(self) -> None:
        """Write the memory, if it has a place and something changed; files changed just
        now are left out.
        """
        if self.memory is not None and self.changed:
            write_json(
                self.memory,
                {
                    path: entry
                    for path, entry in self.known.items()
                    if path not in self.unsettled
                },
            )
            self.changed = False


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
