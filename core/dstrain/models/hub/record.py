"""Record what was downloaded of a published model, and select files by patterns."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from dstrain.console import number_of
from dstrain.errors import StateError
from dstrain.storage import file_mark, sha256, write_json
from dstrain.storage.hashing import FileMark

RECORD = ".fetched.json"
FORMAT = 2
CODE = frozenset({".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
"""Endings of files that are programs, or may hold them."""
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


@dataclass(frozen=True)
class DownloadedFile:
    """A file that was found equal to the hub's."""

    mark: FileMark
    """Its mark at that time."""
    digest: str
    """The digest that the hub listed."""
    sha256: str


@dataclass(frozen=True)
class RemoteFile:
    """A file as a hub lists it."""

    size: int
    """The size in bytes."""
    digest: str
    """"sha256:..." of its bytes; '' or one of another kind is not compared."""

    def verify(self, path: Path) -> DownloadedFile | None:
        """Return a local file as it is recorded; None if its size or digest differs."""
        if path.stat().st_size != self.size:
            return None
        digest = sha256(path)
        if self.digest.startswith("sha256:") and self.digest != f"sha256:{digest}":
            return None
        return DownloadedFile(file_mark(path), self.digest, digest)


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
    kept: Mapping[str, DownloadedFile]
    """Path -> the file as it was downloaded, possibly at another revision."""

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """Read a folder's record, if any; raises StateError if it cannot be read."""
        path = folder / RECORD
        try:
            data = json.loads(path.read_bytes())
            if data.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            for name, kind in (("tree", RemoteFile), ("kept", DownloadedFile)):
                data[name] = {key: kind(**file) for key, file in data[name].items()}
            return cls(**data)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged one may be anything
            advice = "remove it to use the files beside it as they are"
            raise StateError(path, f"cannot be read: {error}", advice) from error

    def write(self, folder: Path) -> None:
        """Replace the record of a folder; raises SystemFault."""
        write_json(folder / RECORD, {"format": FORMAT, **asdict(self)})

    def has(self, name: str, folder: Path) -> bool:
        """Return whether a listed file is here as it was downloaded.

        A file with another time and the same bytes was copied or touched, not changed.
        Raises StateError if it was changed.
        """
        path = folder / name
        known = self.kept.get(name)
        if known is None or not path.exists():
            return False
        # Of the mark, what a copy keeps: size and time of the last change.
        changed = file_mark(path)[:2] != known.mark[:2]
        if changed and sha256(path) != known.sha256:
            digest = f"its sha256 is no longer {known.sha256[:16]}..."
            advice = (
                "remove it to download it again; give --model_paths for your own file"
            )
            raise StateError(path, f"was changed after its download: {digest}", advice)
        return known.digest == self.tree[name].digest


def select(names: Iterable[str], pattern: str) -> list[str]:
    """Return the files that a pattern means: `*` stays within a folder, and a folder
    ends in "/"; "" is the whole.

    Files that may hold programs are left out unless the pattern names their ending.
    """
    found = []
    for name in names:
        # Only a pattern that begins at the root must match the whole path.
        path = PurePosixPath("/", name)
        inside = _is_folder(pattern) and name.startswith(pattern)
        allowed = path.suffix not in CODE or pattern.endswith(path.suffix)
        is_meant = inside or bool(pattern and path.match(f"/{pattern}"))
        if is_meant and allowed and path.name[0] != ".":
            found.append(name)
    return sorted(found)


def _is_folder(pattern: str) -> bool:
    return not pattern or pattern.endswith("/")


def local_files(folder: Path, pattern: str) -> list[str]:
    """Return the files in a folder that a pattern means, without hidden ones."""
    found = folder.glob(f"{pattern}**/*" if _is_folder(pattern) else pattern)
    names = [path.relative_to(folder).as_posix() for path in found if path.is_file()]
    return sorted(name for name in names if "/." not in f"/{name}")


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


def described_shards(missing: Sequence[str]) -> str:
    """Return how many files are absent, and the first of them, in words."""
    verb = "is" if len(missing) == 1 else "are"
    return f"{number_of(len(missing), 'shard')} {verb} missing, such as {missing[0]}"
