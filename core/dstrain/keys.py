"""Keys of values: what a stored value is the result of, known before anything is decoded or encoded.

A key is a hash of the unit's name and declared version, the keys of what it reads, the digests of the components
it borrows, and the compute dtype. Library versions and the device are not part of it.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.cells import Cell
from dstrain.errors import StateError, SystemFault
from dstrain.files import sha256, write_json
from dstrain.plan import POSITIVE, Plan, Step

KEY_BYTES = 20
SETTLED = 2 * 10**9
"""Nanoseconds after a change from which a file's times can be trusted: sooner, another change may leave them equal."""


def hashed(kind: str, content: Any) -> str:
    """The hash of JSON data of one kind, as hexadecimal text."""
    text = json.dumps([kind, content], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


@dataclass
class Digests:
    """sha256 of files, remembered in `memory` by path, size, times of modification and change, and inode."""

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
        """One digest of several files, whatever their names, or of every file below a folder, with its place there."""
        return hashed("files", sorted([place, self.of(file)] for place, file in _files(paths)))

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was taken: what was read since is of no key."""
        for _, file in _files(paths):
            if self.known[str(file)][:-1] != file_mark(file):
                raise StateError(str(file), "changed while it was in use", "run :data_process again")

    def save(self) -> None:
        """Write the memory, if it has a place and something changed; files changed just now are left out."""
        if self.memory is not None and self.changed:
            write_json(self.memory, {path: entry for path, entry in self.known.items() if path not in self.unsettled})
            self.changed = False


def input_key(cell: Cell, digests: Digests) -> str:
    """The key of an input: its text or number, or the bytes of its files and how they are loaded."""
    if not cell.files:
        return hashed("literal", [cell.kind, cell.literal])
    return hashed("files", [cell.kind, [digests.of(file) for file in cell.files], cell.parameters])


def step_key(family: str, step: Step, reads: Mapping[str, str], components: Mapping[str, str], dtype: str) -> str:
    """The key of one run of a unit; `reads` and `components` map the unit's own names to keys and digests."""
    borrowed = {name: components[name] for name in step.unit.borrows if name in components}
    side = (step.side or POSITIVE) if "side" in step.unit.borrows else ""
    return hashed("unit", [family, step.unit.name, step.unit.version, dict(reads), borrowed, dtype, side])


def value_keys(plan: Plan, inputs: Mapping[str, str], components: Mapping[str, str], dtype: str) -> dict[str, str]:
    """The key of every value of stage 1, inputs included: '<key of the unit's run>.<name>' for what a unit makes."""
    keys = dict(inputs)
    for step in plan.frozen:
        key = step_key(plan.family, step, {name: keys[value] for name, value in step.reads.items()}, components, dtype)
        keys |= {value: f"{key}.{name}" for name, value in step.makes.items()}
    return keys


def file_mark(path: str | Path) -> list[int]:
    """What changes when a file does: size, times in nanoseconds, inode."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise SystemFault(str(path), f"cannot be read: {error.strerror}") from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Each file with its place below its folder ('' for a file given itself); hidden ones in folders are left out."""
    for path in paths:
        if not path.is_dir():
            yield "", path
            continue
        for file in sorted(path.rglob("*")):
            place = file.relative_to(path)
            if file.is_file() and not any(part.startswith(".") for part in place.parts):
                yield place.as_posix(), file
