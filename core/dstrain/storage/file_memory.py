"""Remember what was computed from files, until they change, in 81 bytes a file."""

import hashlib
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dstrain.errors import SystemFault
from dstrain.storage.files import REPLACES_OPEN_FILES, replacing
from dstrain.storage.hashing import MARK_LENGTH

MARK = struct.Struct("<QqqQ")
VALUE_BYTES = 32
ENTRY = np.dtype(
    [
        ("key", "<u8"),
        ("rest", "<u8"),
        ("mark", f"V{MARK.size}"),
        ("value", f"V{VALUE_BYTES}"),
        ("settled", "?"),
    ]
)
Entries = np.ndarray[Any, np.dtype[np.void]]
FORM = b"dstrain remembers files, form 1".ljust(MARK.size)
"""In place of the mark of the first entry, whose value is the hash of the others."""
HEADER_BYTES = 4096
"""Bytes at the beginning of a file, among which the form is."""


def unreadable(path: str | Path, error: OSError) -> SystemFault:
    """Return the error for a file that cannot be read."""
    return SystemFault(path, f"cannot be read: {error.strerror}")


def is_whole(path: Path) -> bool:
    """Return whether a file is as `ManyFiles.save` wrote it; raises SystemFault."""
    return is_own(path) and stored_entries(path) is not None


def is_own(path: Path) -> bool:
    """Return whether `ManyFiles.save` wrote a file, which may have been damaged since;
    raises SystemFault if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return FORM in file.read(HEADER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def checksum(entries: Entries) -> bytes:
    """Return the hash of entries, which the first of the file has as its value."""
    digest = xxhash.xxh3_128_digest(np.ascontiguousarray(entries).view(np.uint8).data)
    return digest.ljust(VALUE_BYTES, b"\0")


def stored_entries(path: Path) -> Entries | None:
    """Return the entries of a file; None if it is unreadable, or of another form."""
    try:
        table: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    if table.dtype != ENTRY or table.ndim != 1 or not len(table):
        return None
    head, entries = table[0], table[1:]
    known = head["mark"].tobytes() == FORM
    if not known or head["value"].tobytes() != checksum(entries):
        return None
    # Where it is mapped, `save` could not replace it.
    return np.asarray(entries) if REPLACES_OPEN_FILES else np.array(entries)


SETTLED = 2 * 10**9
"""Nanoseconds after a change from which a file's times can be trusted: a second change
within that time may leave them equal.
"""
MOST_RECENT = 2**16
"""Entries that are objects of Python, at least, before they are put with the others."""


class ManyFiles:
    """Values computed from files, each of 32 bytes: sorted in a file that is mapped, and
    in RAM those that came since. Only one thread may use it.
    """

    def __init__(self, path: Path) -> None:
        """Open what an earlier run stored there; what is unreadable is forgotten."""
        self.path = path
        stored = stored_entries(path)
        self._use(np.empty(0, ENTRY) if stored is None else stored)
        self._recent: dict[bytes, bytes] = {}
        self.unsettled = False
        """Whether a file changed so recently that its times cannot be trusted later."""
        self.is_new = False
        """Whether a value was added."""

    def __len__(self) -> int:
        """Return the number of values."""
        self._merge()
        return len(self._entries)

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
        # Those of files that changed too recently cannot be trusted later.
        is_settled = time.time_ns() - newest >= SETTLED
        self.unsettled = self.unsettled or not is_settled
        self.is_new = True
        entry = _mark(marks) + value.ljust(VALUE_BYTES, b"\0") + bytes([is_settled])
        self._recent[_hash(key)] = entry
        if len(self._recent) > max(MOST_RECENT, len(self._entries) // 4):
            self._merge()

    def save(self) -> None:
        """Store the values, but for files that changed just now; raise SystemFault.

        A file of another form, or a link, is somebody else's and stays.
        """
        if os.path.lexists(self.path) and (
            self.path.is_symlink() or stored_entries(self.path) is None
        ):
            return
        self._merge()
        settled = self._entries[self._entries["settled"]]
        head = np.zeros(1, ENTRY)
        head["mark"] = FORM
        head["value"] = checksum(settled)
        header = {
            "descr": np.lib.format.dtype_to_descr(ENTRY),
            "fortran_order": False,
            "shape": (len(settled) + 1,),
        }
        with replacing(self.path) as building, building.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            # Not by numpy, whose error of a full disk does not say so.
            file.write(head.tobytes())
            file.write(settled.view(np.uint8).data)

    def entry(self, key: str) -> tuple[bytes, bytes] | None:
        """Return the mark and the value of a key."""
        hashed = _hash(key)
        entry = self._recent.get(hashed)
        if entry is None:
            place = self._place(hashed)
            if place is None:
                return None
            entry = self._entries[place].tobytes()[len(hashed) :]
        return entry[: MARK.size], entry[MARK.size : MARK.size + VALUE_BYTES]

    def number(self, key: str) -> int:
        """Return a number below the number of values that no other key has, until values
        are added. Raises KeyError for a key without a value.
        """
        self._merge()
        place = self._place(_hash(key))
        if place is None:
            raise KeyError(key)
        return place

    def _place(self, hashed: bytes) -> int | None:
        first, rest = struct.unpack("<QQ", hashed)
        place = int(self._keys.searchsorted(np.uint64(first)))
        while place < len(self._keys) and self._keys[place] == first:
            if self._entries["rest"][place] == rest:
                return place
            place += 1
        return None

    def _merge(self) -> None:
        if not self._recent:
            return
        data = b"".join(key + entry for key, entry in self._recent.items())
        self._recent = {}
        self._add(np.frombuffer(data, ENTRY), self._entries)

    def add_absent(self, other: "ManyFiles") -> None:
        """Add what another memory has, and this one lacks."""
        self._merge()
        self._add(self._entries, other._entries)

    def _add(self, *parts: Entries) -> None:
        """Use these entries, of several of one key the first."""
        entries = np.concatenate(parts)
        entries = entries[np.lexsort((entries["rest"], entries["key"]))]
        keys, rest = entries["key"], entries["rest"]
        is_old = (keys[1:] == keys[:-1]) & (rest[1:] == rest[:-1])
        self._use(entries[np.append(True, ~is_old)])

    def _use(self, entries: Entries) -> None:
        self._entries = entries
        # Side by side, since they are searched.
        self._keys = np.ascontiguousarray(entries["key"])


def _hash(key: str) -> bytes:
    # Names of files that are not UTF-8 have halves of surrogate pairs.
    data = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def _mark(marks: Sequence[int]) -> bytes:
    """Return the mark of a file as bytes; of several files the hash of their marks."""
    if len(marks) == MARK_LENGTH:
        return MARK.pack(*marks)
    data = struct.pack(f"<{len(marks)}q", *(number % 2**63 for number in marks))
    return hashlib.blake2b(data, digest_size=MARK.size).digest()


VARIABLE = "DSTRAIN_CACHE"


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


def save_for_user(memory: ManyFiles) -> None:
    """Store what is remembered in a user's folder, where that is possible."""
    if user_cache() is not None:
        with suppress(SystemFault, OSError):
            memory.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ManyFiles.save(memory)
