"""Download the files of a published model or dataset, and verify them."""

import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TypeVar

from dstrain.config.options import Hub
from dstrain.console import get_logger, number_of
from dstrain.errors import DstrainError, StateError, SystemFault, nearest
from dstrain.models.hub.clients import CLIENTS, first_line, is_absent, is_refused
from dstrain.models.hub.model_source import ModelSource, find_local
from dstrain.models.hub.record import Record, select
from dstrain.storage import file_mark
from dstrain.storage.locks import FolderLock

logger = get_logger(__name__)
T = TypeVar("T")
STAGING = ".fetching"
"""The folder, beside a model's files, of files that are not verified yet."""
QUIET_WAIT = 5.0
"""Seconds after which a process says that it waits for another one's download."""


class Download:
    """A download from a hub to the folder of a model."""

    def __init__(self, source: ModelSource, hub: Hub) -> None:
        self.source = source
        self.hub = hub
        self.client = CLIENTS[hub]()

    def run(self, pattern: str) -> list[str]:
        """Download the files of a pattern, and config.json beside them."""
        record = self._known_files()
        names = select(record.tree, pattern)
        if not names:
            where = f"{self.hub} at revision {record.revision}"
            what = f"none of the {len(record.tree)} files on {where} matches{nearest(pattern, record.tree)}"
            raise StateError(f"{self.source.named}:{pattern}", what)
        configs = {str(PurePosixPath(name).with_name("config.json")) for name in names}
        wanted = sorted(configs.intersection(record.tree).union(names))
        folder = self.source.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder_lock = FolderLock(folder)
            if not folder_lock.acquire(QUIET_WAIT):
                logger.info(f"waiting for the process that downloads to {folder}")
                folder_lock.acquire(math.inf)
            with folder_lock:
                # Another process may have downloaded them while this one waited.
                if not find_local(self.source, pattern):
                    self._download(record, wanted)
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            advice = f"choose another disk with {self.source.base_variable}"
            raise SystemFault(folder, what, advice) from error
        return names

    def _known_files(self) -> Record:
        """Return the record of the folder, else a new one with what the hub lists."""
        old = Record.read(self.source.folder)
        asked = self.source.revision
        if old and old.hub == self.hub and asked in ("", old.revision, old.commit):
            # A folder holds one revision: a branch that moved on is not mixed in.
            return old
        revision = asked or self.client.default_revision
        kind = self.source.kind
        commit, files = self._ask("", self.client.list_files, revision, kind)
        for name in files:
            outside = name.startswith("/") or ".." in PurePosixPath(name).parts
            if outside or "\\" in name:
                what = f"the hub lists a file outside the {kind}'s folder: {name!r}"
                raise SystemFault(self.source.model_id, what)
        return Record(self.hub, self.source.model_id, revision, commit, files, {})

    def _download(self, record: Record, wanted: Iterable[str]) -> None:
        """Download the missing ones of the wanted files, and record those that are verified
        and in their place.

        Raises StateError for another file in the place of one, except for an unchanged
        one of another revision, which is replaced.
        """
        folder = self.source.folder
        staging = folder / STAGING
        old = Record.read(folder)
        kept = dict(old.kept) if old else {}
        record = replace(record, kept=kept)
        missing = []
        for name in wanted:
            path = folder / name
            if record.has(name, folder):
                continue
            same = record.tree[name].verify(path) if path.exists() else None
            if same:
                kept[name] = same
            elif path.exists() and name not in kept:
                revision = record.revision
                what = f"differs from the file of {self.hub} at revision {revision}"
                raise StateError(path, what, "move it away to download that one")
            else:
                missing.append(name)
        # Written first: the folder is then known to lack files, whatever happens.
        record.write(folder)
        total = 0
        for name in missing:
            staged = staging / name
            # Clients continue a file, or parts of it, whose names start with its own.
            parts = staged.parent.glob(f"{staged.name}*")
            size = record.tree[name].size - sum(part.stat().st_size for part in parts)
            total += max(0, size)
        self._announce(missing, total)
        # What is not recorded of a killed run is compared again, not downloaded again.
        try:
            for name in missing:
                staged = staging / name
                path = folder / name
                at = record.commit or record.revision
                kind = self.source.kind
                self._ask(name, self.client.download, at, name, staging, kind)
                done = record.tree[name].verify(staged)
                if done is None:
                    staged.unlink()
                    what = f"{self._label} sent another size or sha256 of {name} than it lists"
                    advice = f"run the same command again; if the files there have changed, remove {folder} first"
                    raise SystemFault(self.source.named, what, advice)
                with staged.open("rb") as file:
                    os.fsync(file.fileno())
                path.parent.mkdir(parents=True, exist_ok=True)
                staged.replace(path)
                kept[name] = replace(done, mark=file_mark(path))
        finally:
            record.write(folder)
        shutil.rmtree(staging, ignore_errors=True)

    def _announce(self, missing: list[str], total: int) -> None:
        """Log what is downloaded; refuse files that do not fit on the disk."""
        folder = self.source.folder
        free = shutil.disk_usage(folder).free
        if total > free:
            what = f"{total:,} bytes are to be downloaded, but only {free:,} are free"
            advice = f"choose another disk with {self.source.base_variable}"
            raise SystemFault(folder, what, advice)
        if missing:
            logger.info(
                f"downloading {number_of(len(missing), 'file')}, {total:,} bytes, of "
                f"{self.source.named} from {self.hub} to {folder}"
            )

    @property
    def _label(self) -> str:
        return f"{self.hub} ({first_line(self.client.endpoint)})"

    def _ask(self, name: str, call: Callable[..., T], *arguments: object) -> T:
        """Call the client for the model, or for one of its files; raise what went wrong
        as an error of dstrain.
        """
        try:
            return call(self.source.model_id, *arguments)
        # A client raises its own errors, and those of the libraries that it uses.
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # this machine failed
            kind: type[DstrainError] = SystemFault
            what = f"{name} cannot be downloaded from".lstrip()
            others = " or ".join(f"--hub {hub}" for hub in CLIENTS if hub != self.hub)
            advice = "complete files are kept: run the same command again"
            if is_refused(error):
                advice = f"give your access token in {self.client.token}"
            if not name and is_absent(error):
                kind = StateError
                what = f"no such {self.source.kind} or revision on"
                advice = f"if it is private, give a token in {self.client.token}"
            raise kind(
                self.source.named,
                f"{what} {self._label}",
                f"{advice}, or try {others}",
                f"the cause: {first_line(str(error))}",
            ) from error
