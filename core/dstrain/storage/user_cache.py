"""Remember the digests of model files for all runs of a user."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dstrain.errors import SystemFault
from dstrain.storage.hashing import Digests, files_in

VARIABLE = "DSTRAIN_CACHE"
FILE = "model_files.json"


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
        files = [file for _, file in files_in(paths)]
        if all(os.path.abspath(file) in self.known for file in files):
            return super().of_all(paths)
        # hashlib lets other threads run.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(self.of, files))
        return super().of_all(paths)

    def record(self, path: str | Path) -> list[object]:
        """Return the mark and the sha256 of a file that `of` was asked for."""
        return super().record(os.path.abspath(path))

    def check_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise StateError for a file that changed since its digest was computed."""
        super().check_unchanged([Path(os.path.abspath(path)) for path in paths])

    def save(self) -> None:
        """Store the digests, beside those that other runs have stored meanwhile, as far
        as their files exist.
        """
        if self.folder is None:
            return
        own = self.known
        stored = ModelDigests().known
        if all(stored.get(key) == own[key] for key in own.keys() - self.unsettled):
            return
        both = {**stored, **own}
        self.known = {key: both[key] for key in both if os.path.exists(key)}
        with suppress(SystemFault, OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().save()
        self.known = own
