"""What was fetched of a model id: a small record beside its files, and whether what is
here is whole.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from dstrain.errors import StateError, SystemFault
from dstrain.models.hub_clients import Listed
from dstrain.storage.files import lock, write_json
from dstrain.storage.hashing import file_mark, sha256

RECORD = ".fetched.json"
FORMAT = 2
CODE = frozenset({".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
"""Endings of files that are programs, or that may hold them: a pattern must name the
ending.
"""
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


class Kept(NamedTuple):
    """A file that was fetched: its mark then, the digest it was found equal to, and its
    sha256.
    """

    mark: list[int]
    digest: str
    sha256: str


@dataclass(frozen=True)
class Record:
    """What is known of a model id's folder: the hub's list at the revision last asked
    for, and what was fetched.

    tree: path -> the file as the hub lists it. kept: path -> the file as it was put
    here, maybe at another revision.
    """

    hub: str
    model_id: str
    revision: str
    commit: str
    tree: Mapping[str, Listed]
    kept: Mapping[str, Kept]

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """The record of a folder, if there is one; raises StateError if it cannot be
        read.
        """
        path = folder / RECORD
        try:
            data = json.loads(path.read_bytes())
            if data.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            tree = {name: Listed(**value) for name, value in data.pop("tree").items()}
            kept = {name: Kept(**value) for name, value in data.pop("kept").items()}
            return cls(**data, tree=tree, kept=kept)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            help_line = "remove it: the files beside it are then taken as they are, or compared with the hub's list"
            raise StateError(
                str(path), f"cannot be read: {error}", help_line
            ) from error

    def write(self, folder: Path) -> None:
        """Replace the record of a folder; raises SystemFault."""
        data: dict[str, Any] = asdict(self) | {"format": FORMAT}
        data["tree"] = {name: listed._asdict() for name, listed in self.tree.items()}
        data["kept"] = {name: kept._asdict() for name, kept in self.kept.items()}
        write_json(folder / RECORD, data)

    def is_of(self, revision: str) -> bool:
        """Whether it tells of this revision: a name as it was asked for, or a commit;
        '' is any.
        """
        return revision in ("", self.revision) or (
            len(revision) >= 7 and self.commit.startswith(revision)
        )

    def holds(self, name: str, folder: Path) -> bool:
        """Whether a file of the tree is here as listed; raises StateError if it was
        fetched and changed since.
        """
        kept = self.kept.get(name)
        return (
            kept is not None
            and kept.digest == self.tree[name].digest
            and unchanged(folder / name, kept)
        )


def unchanged(path: Path, kept: Kept) -> bool:
    """Whether a file that was fetched is still here, by its mark, else by its bytes;
    raises StateError if changed.

    A file with another mark and the same bytes is unchanged.
    """
    if not path.exists():
        return False
    if file_mark(path) != kept.mark and sha256(path) != kept.sha256:
        help_line = "remove it, and it is fetched again; a file of your own is given with --model_paths"
        raise StateError(
            str(path),
            f"is not what was fetched: its sha256 is no longer {kept.sha256[:16]}...",
            help_line,
        )
    return True


def note_marks(record: Record, names: Iterable[str], folder: Path) -> None:
    """Note the marks of files that `holds` found unchanged, so that they need not be
    read again.

    Not where that is not allowed, nor where another process has the folder or wrote the
    record meanwhile.
    """
    new = {
        name: record.kept[name]._replace(mark=file_mark(folder / name))
        for name in names
    }
    if any(record.kept[name] != kept for name, kept in new.items()):
        with suppress(StateError, SystemFault), lock(folder):
            if Record.read(folder) == record:
                replace(record, kept={**record.kept, **new}).write(folder)


def kept_file(path: Path, listed: Listed) -> Kept:
    """What the record says of a file that was found equal to what the hub lists."""
    kind, _, digest = listed.digest.partition(":")
    return Kept(
        file_mark(path), listed.digest, digest if kind == "sha256" else sha256(path)
    )


def same(path: Path, listed: Listed) -> bool:
    """Whether a file has the size and the digest that the hub lists."""
    if path.stat().st_size != listed.size:
        return False
    kind, _, digest = listed.digest.partition(":")
    if kind == "git":
        blob = hashlib.sha1(b"blob %d\0" % listed.size, usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                blob.update(block)
        return blob.hexdigest() == digest
    return not digest or sha256(path) == digest


def select(names: Iterable[str], pattern: str) -> list[str]:
    """The files that a pattern means: `*` stays within a folder, `**` does not, a
    folder ends in "/".

    Programs and files that may hold some are left out, unless the pattern names their
    ending.
    """
    parts = PurePosixPath(pattern + "**" if pattern.endswith("/") else pattern).parts
    found = (
        name
        for name in names
        if _fits(name.split("/"), parts) and not Path(name).name.startswith(".")
    )
    return sorted(
        name
        for name in found
        if Path(name).suffix not in CODE or pattern.endswith(Path(name).suffix)
    )


def beside(names: Iterable[str], pattern: str) -> list[str]:
    """The small files that belong to what a pattern means: configuration and index
    beside it, the pipeline's index.
    """
    folder = pattern.rpartition("/")[0]
    at = f"{folder}/" if folder else ""
    wanted = (f"{at}config.json", f"{at}*.index.json", "model_index.json")
    return sorted({name for one in wanted for name in select(names, one)})


def here(folder: Path, pattern: str) -> list[str]:
    """The files in a folder that a pattern means, by path; nothing of those that begin
    with a dot.
    """
    if pattern.endswith("/"):
        found: Iterable[Path] = (folder / pattern).rglob("*")
    else:
        found = folder.glob(pattern)
    names = (path.relative_to(folder) for path in found if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    )


def missing_shards(names: Collection[str]) -> list[str]:
    """The names of files that others in these say there are, as
    `x-00001-of-00003.safetensors` says of two more.
    """
    lacking = []
    for hit in filter(None, map(SHARD.fullmatch, names)):
        width, count = len(hit[2]), int(hit[3])
        every = (
            f"{hit[1]}-{i:0{width}}-of-{hit[3]}{hit[4]}" for i in range(1, count + 1)
        )
        lacking += [name for name in every if name not in names]
    return sorted(set(lacking))


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, of which "**" stands for any
    number of folders.
    """
    if not name or not pattern:
        return not name and not pattern
    if pattern[0] == "**":
        return len(pattern) == 1 or any(
            _fits(name[start:], pattern[1:]) for start in range(len(name))
        )
    return fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])
