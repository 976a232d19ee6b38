"""Record what was fetched of a published model, and select files by patterns."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dstrain.errors import StateError, SystemFault
from dstrain.storage.files import lock, write_json
from dstrain.storage.hashing import file_mark, sha256

RECORD = ".fetched.json"
FORMAT = 2
CODE = frozenset({".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
"""Endings of files that are programs, or may hold them."""
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


class RemoteFile(NamedTuple):
    """A file as a hub lists it."""

    size: int
    """In bytes."""
    digest: str
    """"sha256:..." of its bytes, "git:..." of its git blob, or ''."""

    def matches(self, path: Path) -> bool:
        """Return whether a file on this machine has this size and digest."""
        if path.stat().st_size != self.size:
            return False
        kind, _, digest = self.digest.partition(":")
        if kind == "git":  # files that are small enough for git itself
            blob = b"blob %d\0" % self.size + path.read_bytes()
            return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == digest
        return not digest or sha256(path) == digest


class DownloadedFile(NamedTuple):
    """A file that was found equal to the hub's."""

    mark: list[int]
    """Its `file_mark` at that time."""
    digest: str
    """The digest that the hub listed."""
    sha256: str

    @classmethod
    def of(cls, path: Path, listed: RemoteFile) -> "DownloadedFile":
        """Describe a file that matches the listed one."""
        kind, _, digest = listed.digest.partition(":")
        known = digest if kind == "sha256" else sha256(path)
        return cls(file_mark(path), listed.digest, known)


@dataclass(frozen=True)
class Record:
    """What is known of the folder of a published model."""

    hub: str
    model_id: str
    revision: str
    commit: str
    """'' if the hub does not tell it."""
    tree: Mapping[str, RemoteFile]
    """Path -> the file as the hub lists it at this revision."""
    downloaded: Mapping[str, DownloadedFile]
    """Path -> the file as it was fetched, possibly at another revision."""

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """Read the record of a folder, if there is one; raises StateError if it cannot
        be read.
        """
        path = folder / RECORD
        try:
            data = json.loads(path.read_bytes())
            if data.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            tree = {name: RemoteFile(**file) for name, file in data.pop("tree").items()}
            kept = data.pop("kept").items()
            downloaded = {name: DownloadedFile(**file) for name, file in kept}
            return cls(**data, tree=tree, downloaded=downloaded)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                str(path),
                f"cannot be read: {error}",
                "remove it: the files beside it are then used as they are",
            ) from error

    def write(self, folder: Path) -> None:
        """Replace the record of a folder; raises SystemFault."""
        data = {
            "format": FORMAT,
            "hub": self.hub,
            "model_id": self.model_id,
            "revision": self.revision,
            "commit": self.commit,
            "tree": {name: file._asdict() for name, file in self.tree.items()},
            "kept": {name: file._asdict() for name, file in self.downloaded.items()},
        }
        write_json(folder / RECORD, data)

    def is_of(self, revision: str) -> bool:
        """Return whether the files are of a revision: its name, or at least 7 digits of
        its commit; '' is any.
        """
        if len(revision) >= 7 and self.commit.startswith(revision):
            return True
        return revision in ("", self.revision)

    def has(self, name: str, folder: Path) -> bool:
        """Return whether a listed file is here as it was fetched.

        A file with another mark and the same bytes was copied or touched, not changed.
        Raises StateError if it was changed.
        """
        path, known = folder / name, self.downloaded.get(name)
        if known is None or known.digest != self.tree[name].digest:
            return False
        if not path.exists():
            return False
        if file_mark(path) != known.mark and sha256(path) != known.sha256:
            raise StateError(
                str(path),
                f"was changed after its download: its sha256 is no longer {known.sha256[:16]}...",
                "remove it to download it again; give a file of your own with --model_paths",
            )
        return True

    def refresh_marks(self, names: Iterable[str], folder: Path) -> None:
        """Record the present marks of unchanged files, so that they need not be read
        again.
        """
        marked = {
            name: self.downloaded[name]._replace(mark=file_mark(folder / name))
            for name in names
        }
        downloaded = {**self.downloaded, **marked}
        if downloaded == self.downloaded:
            return
        # The folder may be read-only, in use, or fetched into since this was read.
        with suppress(StateError, SystemFault), lock(folder):
            if Record.read(folder) == self:
                replace(self, downloaded=downloaded).write(folder)


def select(names: Iterable[str], pattern: str) -> list[str]:
    """Return the files that a pattern means: `*` stays within a folder, `**` does not,
    and a folder ends in "/".

    Files that may hold programs are left out unless the pattern names their ending.
    """
    parts = PurePosixPath(pattern + "**" if pattern.endswith("/") else pattern).parts
    found = []
    for name in names:
        path = PurePosixPath(name)
        allowed = path.suffix not in CODE or pattern.endswith(path.suffix)
        if allowed and not path.name.startswith(".") and _fits(path.parts, parts):
            found.append(name)
    return sorted(found)


def companion_files(names: Iterable[str], pattern: str) -> list[str]:
    """Return the small files that belong to those of a pattern: configuration and
    index beside them, and the model's own index.
    """
    folder = pattern.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    found: set[str] = set()
    for wanted in (f"{prefix}config.json", f"{prefix}*.index.json", "model_index.json"):
        found.update(select(names, wanted))
    return sorted(found)


def local_files(folder: Path, pattern: str) -> list[str]:
    """Return the files in a folder that a pattern means, without hidden ones."""
    if pattern.endswith("/"):
        found: Iterable[Path] = (folder / pattern).rglob("*")
    else:
        found = folder.glob(pattern)
    names = [path.relative_to(folder) for path in found if path.is_file()]
    return sorted(
        name.as_posix()
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    )


def missing_shards(names: Collection[str]) -> list[str]:
    """Return the absent files that the names of others count, as
    `x-00001-of-00003.safetensors` counts two more.
    """
    missing = set()
    for name in names:
        shard = SHARD.fullmatch(name)
        if shard is None:
            continue
        stem, number, count, suffix = shard.groups()
        for i in range(1, int(count) + 1):
            missing.add(f"{stem}-{i:0{len(number)}}-of-{count}{suffix}")
    return sorted(missing.difference(names))


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path fit those of a pattern; "**" stands for any
    number of folders.
    """
    if not name or not pattern:
        return not name and not pattern
    if pattern[0] == "**":
        rests = (name[start:] for start in range(len(name)))
        return len(pattern) == 1 or any(_fits(rest, pattern[1:]) for rest in rests)
    return fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])
