"""Remember what was computed from files, until they change: one SQLite table in the user's
folder, for all runs. Where it cannot be read or written, nothing is remembered.
"""

import hashlib
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from dstrain.errors import StateError, SystemFault
from dstrain.storage.hashing import (
    MARK_LENGTH,
    FileMark,
    file_mark,
    files_in,
    hash_json,
    sha256,
)

NAME = "files.sqlite"
"""The file in the user's folder."""
VARIABLE = "DSTRAIN_CACHE"
SETTLED = 2 * 10**9
"""Nanoseconds after a change from which a file's times can be trusted: a second change
within that time may leave them equal.
"""
BUSY = 60.0
"""Seconds to wait for another run that stores values."""
MARK = struct.Struct("<QqqQ")
VALUE_BYTES = 32
COLUMNS = "(key BLOB PRIMARY KEY, mark BLOB, value BLOB, checksum BLOB)"
STORED = f"CREATE TABLE files {COLUMNS} WITHOUT ROWID"
"""What the file has; one that has anything else is somebody else's, and stays."""
Entry = tuple[bytes, bytes]
"""A mark, and the value of files that had it."""


def user_cache(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of what is remembered for a user; None for one without a home."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    # A relative one counts as unset, says the XDG Base Directory Specification.
    xdg = Path(environment.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "dstrain"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "dstrain"
    return None


class FileMemory:
    """Values of 32 bytes that were computed from files. Only one thread may use it."""

    kind = ""
    """What the values are; each kind has keys of its own."""

    def __init__(self, kind: str = "") -> None:
        """Open what earlier runs stored; what is unreadable is forgotten."""
        self.kind = kind or self.kind
        folder = user_cache()
        self.path = None if folder is None else folder / NAME
        self.unsettled = False
        """Whether a file changed so recently that its times cannot be trusted later."""
        # What this run used: a database without a name, which SQLite moves to the disk
        # where it is large.
        self._used = sqlite3.connect("", isolation_level=None, timeout=BUSY, uri=True)
        self._used.execute("PRAGMA main.journal_mode = OFF")
        self._used.execute(
            "CREATE TABLE used (number INTEGER PRIMARY KEY, key BLOB UNIQUE,"
            " mark BLOB, value BLOB, is_new INTEGER)"
        )
        self._is_stored = False
        if self.path is not None:
            with suppress(sqlite3.Error):
                place = f"{self.path.absolute().as_uri()}?mode=ro"
                self._used.execute("ATTACH ? AS stored", [place])
                self._is_stored = _tables(self._used, "stored") == [STORED]

    def __len__(self) -> int:
        """Return the number of values that were used."""
        (count,) = self._used.execute("SELECT count(*) FROM used").fetchone()
        return int(count)

    def recall(self, key: str, marks: Sequence[int]) -> bytes | None:
        """Return the value of a key, None if its files had other marks then."""
        entry = self.entry(key)
        if entry is None or entry[0] != _mark(marks):
            return None
        return entry[1]

    def remember(self, key: str, marks: Sequence[int], value: bytes = b"") -> None:
        """Keep a value of files that had these marks, joined, before it was made."""
        # The second and third number of each mark are the file's times.
        newest = max(*marks[1::MARK_LENGTH], *marks[2::MARK_LENGTH])
        is_settled = time.time_ns() - newest >= SETTLED
        self.unsettled = self.unsettled or not is_settled
        entry = (_mark(marks), value.ljust(VALUE_BYTES, b"\0"))
        self._use(self._hash(key), entry, is_new=is_settled)

    def save(self) -> None:
        """Store the values, but for those of files that changed just now."""
        rows = self._used.execute("SELECT key, mark, value FROM used WHERE is_new")
        new = ((*row, _checksum(*row)) for row in rows)
        first = next(new, None)
        if self.path is None or first is None:
            return
        with suppress(OSError, sqlite3.Error):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY)) as stored, stored:
                stored.execute("BEGIN IMMEDIATE")
                if not _tables(stored):
                    stored.execute(STORED)
                if _tables(stored) == [STORED]:
                    insert = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)"
                    stored.executemany(insert, chain([first], new))

    def entry(self, key: str) -> Entry | None:
        """Return the mark and the value of a key."""
        hashed = self._hash(key)
        find = "SELECT mark, value FROM used WHERE key = ?"
        found: Entry | None = self._used.execute(find, [hashed]).fetchone()
        if found is None and self._is_stored:
            found = self._stored_entry(hashed)
            if found is not None:
                self._use(hashed, found, is_new=False)
        return found

    def number(self, key: str) -> int:
        """Return a number below the number of values that no other used key has. Raises
        KeyError for a key that was not used.
        """
        find = "SELECT number FROM used WHERE key = ?"
        found = self._used.execute(find, [self._hash(key)]).fetchone()
        if found is None:
            raise KeyError(key)
        return int(found[0]) - 1

    def _use(self, hashed: bytes, entry: Entry, *, is_new: bool) -> None:
        self._used.execute(
            "INSERT INTO used (key, mark, value, is_new) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET"
            " mark = excluded.mark, value = excluded.value, is_new = excluded.is_new",
            [hashed, *entry, is_new],
        )

    def _stored_entry(self, hashed: bytes) -> Entry | None:
        find = "SELECT mark, value, checksum FROM stored.files WHERE key = ?"
        with suppress(sqlite3.Error):
            for mark, value, checksum in self._used.execute(find, [hashed]):
                # SQLite does not notice a bit that changed on the disk.
                if _checksum(hashed, mark, value) == checksum:
                    return mark, value
        return None

    def _hash(self, key: str) -> bytes:
        # Names of files that are not UTF-8 have halves of surrogate pairs.
        data = f"{self.kind}\0{key}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=16).digest()


def _tables(database: sqlite3.Connection, name: str = "main") -> list[str]:
    return [sql for (sql,) in database.execute(f"SELECT sql FROM {name}.sqlite_master")]


def _checksum(key: bytes, mark: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + mark + value)


def _mark(marks: Sequence[int]) -> bytes:
    """Return the mark of a file as bytes; of several files the hash of their marks."""
    if len(marks) == MARK_LENGTH:
        return MARK.pack(*marks)
    data = struct.pack(f"<{len(marks)}q", *(number % 2**63 for number in marks))
    return hashlib.blake2b(data, digest_size=MARK.size).digest()


class Digests(FileMemory):
    """The sha256 of files, read again only where a file changed."""

    kind = "sha256"

    def of(self, path: str | Path) -> str:
        """Return the sha256 of a file's bytes; raises SystemFault."""
        key = os.path.abspath(path)
        digest = self._known(key)
        if digest is None:
            mark, digest = _read(key)
            self.remember(key, mark, digest)
        return digest.hex()

    def of_all(self, paths: Iterable[Path]) -> str:
        """Return one digest of several files, whose own names do not count; they are read
        at the same time.

        Of a folder, every file below it counts with its relative path.
        """
        places = [(place, os.path.abspath(file)) for place, file in files_in(paths)]
        new = [file for _, file in places if self._known(file) is None]
        # hashlib lets other threads run.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for file, (mark, digest) in zip(new, pool.map(_read, new), strict=True):
                self.remember(file, mark, digest)
        files = [[place, self.of(file)] for place, file in places]
        return hash_json("files", sorted(files))

    def record(self, path: str | Path) -> list[Any]:
        """Return the mark and the sha256 of a file that `of` was asked for, as they were
        then; `first_changed` compares them.
        """
        entry = self.entry(os.path.abspath(path))
        if entry is None:
            raise KeyError(path)
        mark, digest = entry
        return [*MARK.unpack(mark), digest.hex()]

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was computed.

        Values computed from such a file would be stored under the wrong key.
        """
        for _, file in files_in(paths):
            with suppress(SystemFault):
                if self._known(os.path.abspath(file)) is not None:
                    continue
            what = "changed while it was in use"
            raise StateError(file.absolute(), what, "run the same command again")

    def _known(self, path: str) -> bytes | None:
        """Return the digest of a file that did not change since it was read."""
        try:
            return self.recall(path, file_mark(path))
        except OSError as error:
            raise _unreadable(path, error) from error


def _read(path: str) -> tuple[FileMark, bytes]:
    """Return the mark and the sha256 of a file; raises SystemFault."""
    try:
        return file_mark(path), bytes.fromhex(sha256(Path(path)))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> SystemFault:
    return SystemFault(path, f"cannot be read: {error.strerror}")
