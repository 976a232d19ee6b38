"""Remember the sha256 of files, of a cache's and of a user's models."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from dstrain.errors import StateError
from dstrain.storage.file_memory import (
    MARK,
    ManyFiles,
    save_for_user,
    unreadable,
    user_cache,
)
from dstrain.storage.hashing import FileMark, file_mark, files_in, hash_json, sha256

MODEL_FILES = "model_files.npy"


class Digests(ManyFiles):
    """The sha256 of files, read again only where a file changed."""

    def known(self, path: str) -> bytes | None:
        """Return the digest of a file that did not change since it was read; None for
        another one. Raises SystemFault.
        """
        try:
            return self.recall(path, file_mark(path))
        except OSError as error:
            raise unreadable(path, error) from error

    def of(self, path: str | Path) -> str:
        """Return the sha256 of a file's bytes; raises SystemFault."""
        key = str(path)
        digest = self.known(key)
        if digest is None:
            mark, digest = read(key)
            self.remember(key, mark, digest)
        return digest.hex()

    def of_all(self, paths: Iterable[Path]) -> str:
        """Return one digest of several files, whose own names do not count.

        Of a folder, every file below it counts with its relative path.
        """
        files = [[place, self.of(file)] for place, file in files_in(paths)]
        return hash_json("files", sorted(files))

    def record(self, path: str | Path) -> list[Any]:
        """Return the mark and the sha256 of a file that `of` was asked for, as they were
        then; `first_changed` compares them.
        """
        entry = self.entry(str(path))
        if entry is None:
            raise KeyError(path)
        mark, digest = entry
        return [*MARK.unpack(mark), digest.hex()]

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was computed.

        Values computed from such a file would be stored under the wrong key.
        """
        for _, file in files_in(paths):
            with suppress(OSError):
                if self.recall(str(file), file_mark(file)) is not None:
                    continue
            what = "changed while it was in use"
            raise StateError(file, what, "run the same command again")


def read(path: str) -> tuple[FileMark, bytes]:
    """Return the mark and the sha256 of a file; raises SystemFault."""
    try:
        return file_mark(path), bytes.fromhex(sha256(Path(path)))
    except OSError as error:
        raise unreadable(path, error) from error


class ModelDigests(Digests):
    """The sha256 of model files, read once for all feature caches of a user.

    Where the user's folder cannot be read or written, nothing is remembered.
    """

    def __init__(self) -> None:
        self.folder = user_cache()
        super().__init__((self.folder or Path(os.devnull)) / MODEL_FILES)

    def of(self, path: str | Path) -> str:
        """Return the sha256 of a file's bytes; raises SystemFault."""
        return super().of(os.path.abspath(path))

    def of_all(self, paths: Iterable[Path]) -> str:
        """Return one digest of several files, which are read at the same time."""
        paths = list(paths)
        files = [os.path.abspath(file) for _, file in files_in(paths)]
        new = [file for file in files if self.known(file) is None]
        # hashlib lets other threads run.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for file, (mark, digest) in zip(new, pool.map(read, new), strict=True):
                self.remember(file, mark, digest)
        return super().of_all(paths)

    def record(self, path: str | Path) -> list[object]:
        """Return the mark and the sha256 of a file that `of` was asked for."""
        return super().record(os.path.abspath(path))

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was computed."""
        super().check_unchanged([Path(os.path.abspath(path)) for path in paths])

    def save(self) -> None:
        """Store the digests, beside those that other runs have stored meanwhile."""
        if self.is_new:
            self.add_absent(ModelDigests())
            save_for_user(self)
