"""Keys of values: what a stored value is the result of, known before anything is decoded or encoded.

A key is a hash of the unit's name and declared version, the keys of what it reads, the digests of the components
it borrows, and the compute dtype. Library versions and the device are not part of it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.dataset import Cell
from dstrain.files import sha256, write_json
from dstrain.plan import POSITIVE, Plan, Step

KEY_BYTES = 20


def hashed(kind: str, content: Any) -> str:
    """The hash of JSON data of one kind, as hexadecimal text."""
    text = json.dumps([kind, content], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


@dataclass
class Digests:
    """sha256 of files, remembered in `memory` by path, size, modification time and inode."""

    memory: Path | None = None
    known: dict[str, list[Any]] = field(default_factory=dict)
    changed: bool = False

    @classmethod
    def remembered(cls, memory: Path) -> "Digests":
        """Read what an earlier run remembered; an unreadable memory is an empty one."""
        try:
            return cls(memory, json.loads(memory.read_text()))
        except (OSError, ValueError):
            return cls(memory)

    def of(self, path: str | Path) -> str:
        """The sha256 of a file's bytes, read again only if the file changed."""
        stat = Path(path).stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = self.known.get(str(path))
        if entry is None or entry[:3] != mark:
            entry = [*mark, sha256(Path(path))]
            self.known[str(path)] = entry
            self.changed = True
        return str(entry[3])

    def of_all(self, paths: tuple[Path, ...]) -> str:
        """One digest of several files, or of every file below a folder, by name and content."""
        files = [
            file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()
        ]
        return hashed("files", sorted([file.name, self.of(file)] for file in files))

    def save(self) -> None:
        """Write the memory, if it has a place and something changed."""
        if self.memory is not None and self.changed:
            write_json(self.memory, self.known)
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
