"""Remember the digests of model files for all runs of a user."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dstrain.errors import SystemFault
from dstrain.storage.file_memory import Digests, ManyFiles, read
from dstrain.storage.hashing import files_in

VARIABLE = "DSTRAIN_CACHE"
FILE = "model_files.npy"


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


class ModelDigests(Digests):
    """The sha256 of model files, read once for all feature caches of a user.

    Where the user's folder cannot be read or written, nothing is remembered.
    """

    def __init__(self) -> None:
        self.folder = user_cache()
        super().__init__((self.folder or Path(os.devnull)) / FILE)

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


def save_for_user(memory: ManyFiles) -> None:
    """Store what is remembered in a user's folder; where that is not possible, nothing is
    remembered.
    """
    if user_cache() is not None:
        with suppress(SystemFault, OSError):
            memory.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ManyFiles.save(memory)
