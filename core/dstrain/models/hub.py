"""Find published model files on this machine, and fetch those that are missing."""

import difflib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from dstrain.config.schema import Hub
from dstrain.console import get_logger
from dstrain.errors import DstrainError, StateError, SystemFault, UsageError
from dstrain.models.hub_clients import CLIENTS, Client, Listing, Reason, first_line
from dstrain.models.hub_record import (
    DownloadedFile,
    Record,
    companion_files,
    local_files,
    missing_shards,
    select,
)
from dstrain.storage.files import HOLDER, LOCK, lock

T = TypeVar("T")
MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")
OFFLINE_VARIABLES = ("DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD")
STAGING = ".fetching"
"""The folder, beside a model's files, of files that are not verified yet."""
QUIET_WAIT = 5.0
"""Seconds after which a process says that it waits for another one's download."""

logger = get_logger(__name__)


def model_base() -> Path:
    """Return the folder of published models, by default ./models."""
    for name in MODEL_BASE_VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    return Path("models")


def offline() -> str:
    """Return the environment variable that forbids every request, or ''."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            return name
    return ""


@dataclass(frozen=True)
class ModelSource:
    """A published model."""

    model_id: str
    revision: str = ""
    """A branch, tag or commit; '' for the hub's default."""
    hub: Hub | None = "modelscope"
    """None forbids fetching."""

    @property
    def folder(self) -> Path:
        """Return the folder of its files."""
        return model_base() / self.model_id

    @property
    def named(self) -> str:
        """Return the model as it is written on a command line."""
        return f"{self.model_id}@{self.revision}" if self.revision else self.model_id


def find_local(source: ModelSource, pattern: str) -> list[str]:
    """Return the files, relative to the model's folder, that a pattern means; [] unless
    all of them are on this machine.

    Fetched files are compared with their record. Files without one are used as they
    are, except for incomplete sets of shards, and where a revision is asked for, since
    nothing tells theirs. Raises StateError for a file that was changed after it was
    fetched.
    """
    folder, record = source.folder, Record.read(source.folder)
    if record is not None:
        if not record.is_of(source.revision):
            return []
        names = select(record.tree, pattern)
        if names:
            if not all(record.has(name, folder) for name in names):
                return []
            record.refresh_marks(names, folder)
            return names
    names = local_files(folder, pattern)
    return [] if source.revision or missing_shards(names) else names


def missing_error(source: ModelSource, pattern: str) -> StateError:
    """Return the error that says which files are missing, and why they are not
    fetched.
    """
    folder, record = source.folder, Record.read(source.folder)
    found = local_files(folder, pattern)
    shards = missing_shards(found)
    what = "no file matches"
    if found and source.revision:
        what = f"the files here are not known to be of revision {source.revision}"
    elif shards:
        what = f"{len(shards)} shards are missing, such as {shards[0]}"
    elif record is not None and select(record.tree, pattern):
        what = "some of the files are missing"
    advice = [f"models are searched for in {MODEL_BASE_VARIABLES[0]}={model_base()}"]
    if offline():
        advice.append(f"nothing is downloaded because {offline()} is set; unset it")
    return StateError(str(folder / pattern), what, *advice)


def fetch(source: ModelSource, pattern: str) -> list[str]:
    """Return the files that a pattern means, as `find_local` does; fetch what is
    missing.

    Of several processes on a machine one fetches, and the others wait for it. Raises
    StateError if the hub has no such model, revision or file, or nothing may be
    fetched; SystemFault if the hub or this machine fails.
    """
    names = find_local(source, pattern)
    if names:
        return names
    if source.hub is None or offline():
        raise missing_error(source, pattern)
    # The id becomes a path, which must lie in the folder of models.
    parts = source.model_id.split("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.model_id) or {".", ".."} & {*parts}:
        raise UsageError(
            "--model_id_with_origin_paths",
            f"{source.model_id!r} is no model id; want OWNER/NAME",
        )
    with _exclusive(source.folder):
        return find_local(source, pattern) or _Fetch(source, source.hub).run(pattern)


class _Fetch:
    """One fetch from a hub, by the process that holds the model's folder."""

    def __init__(self, source: ModelSource, hub: Hub) -> None:
        self.source = source
        self.hub = hub
        self.folder = source.folder
        self.client: Client = CLIENTS[hub]()
        self.label = f"{hub} ({first_line(self.client.endpoint)})"
        old = Record.read(self.folder)
        self.downloaded = old.downloaded if old is not None else {}
        self.revision = source.revision or self.client.default_revision
        self.at = self.revision
        if old is not None and old.hub == hub and not source.revision:
            # A folder holds one revision: a branch that moved on since is not mixed in.
            self.revision, self.at = old.revision, old.commit or old.revision

    def run(self, pattern: str) -> list[str]:
        """Fetch the files of a pattern and what belongs to them."""
        try:
            listing = self._list_files()
            names = select(listing.files, pattern)
            self._check_listing(pattern, listing, names)
            companions = companion_files(listing.files, pattern)
            record = Record(
                self.hub,
                self.source.model_id,
                self.revision,
                listing.commit,
                listing.files,
                self.downloaded,
            )
            self._download(record, [*dict.fromkeys([*companions, *names])])
            return names
        except OSError as error:
            raise SystemFault(
                str(self.folder),
                f"cannot be written: {error.strerror or error}",
                "complete files are kept: make room, or choose another disk with "
                + MODEL_BASE_VARIABLES[0],
            ) from error
        except DstrainError:
            self._remove_empty_folder()
            raise

    def _list_files(self) -> Listing:
        try:
            return self._ask("", self.client.list_files, self.at)
        except StateError:
            if self.at == self.revision:
                raise
            # The commit that the record names is gone.
            return self._ask("", self.client.list_files, self.revision)

    def _check_listing(self, pattern: str, listing: Listing, names: list[str]) -> None:
        for name in listing.files:
            outside = name.startswith("/") or ".." in PurePosixPath(name).parts
            if outside or "\\" in name or not name.isprintable():
                raise SystemFault(
                    self.source.model_id,
                    f"the hub lists a file outside the model's folder: {name!r}",
                )
        if not names:
            known = [n for n in listing.files if PurePosixPath(n).name[0] != "."]
            near = difflib.get_close_matches(pattern, known, cutoff=0.3) or known[:3]
            raise StateError(
                f"{self.source.named}:{pattern}",
                f"no file on {self.hub} matches at revision {self.revision}",
                f"it has {len(known)} files, such as {', '.join(near) or 'none'}",
            )

    def _download(self, record: Record, wanted: list[str]) -> None:
        """Fetch the missing ones of the wanted files, and record each when it is
        verified and in its place.
        """
        record, missing = self._missing(record, wanted)
        # Written first: the folder is then known to lack files, whatever happens.
        record.write(self.folder)
        if missing:
            total = sum(record.tree[name].size for name in missing)
            self._check_space(total)
            logger.info(
                f"downloading {len(missing)} files, {total:,} bytes, of "
                f"{self.source.named} from {self.hub} to {self.folder}"
            )
        commit = record.commit or self.at
        for name in missing:
            listed = record.tree[name]
            # By content, or what is left of another revision's file would be continued.
            content = listed.digest.partition(":")[2] or commit
            staging = self.folder / STAGING / re.sub(r"\W", "-", content)
            staged = staging / name
            self._ask(name, self.client.download, commit, name, staging)
            if not listed.matches(staged):
                staged.unlink()
                raise self._error(
                    "wrong", f"{name} is not {listed.size} bytes of {listed.digest}"
                )
            with staged.open("rb") as file:
                os.fsync(file.fileno())
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(path)
            done = {name: DownloadedFile.of(path, listed)}
            record = replace(record, downloaded={**record.downloaded, **done})
            record.write(self.folder)
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def _missing(
        self, record: Record, wanted: Iterable[str]
    ) -> tuple[Record, list[str]]:
        """Return the files to download, and the record with those that are here and
        equal to the hub's.

        Raises StateError for others in their place, except for unchanged ones of
        another revision, which may be replaced.
        """
        downloaded = dict(record.downloaded)
        missing = []
        for name in wanted:
            path, listed = self.folder / name, record.tree[name]
            if record.has(name, self.folder):
                continue
            if path.exists() and listed.matches(path):
                downloaded[name] = DownloadedFile.of(path, listed)
                continue
            if path.exists() and name not in downloaded:
                raise StateError(
                    str(path),
                    f"differs from the file of {self.hub} at revision {self.revision}",
                    "move it away to download that one; existing files were not modified",
                )
            missing.append(name)
        return replace(record, downloaded=downloaded), missing

    def _check_space(self, total: int) -> None:
        """Refuse files that do not fit on the disk, less what is staged already."""
        needed = total
        for path in self.folder.glob(f"{STAGING}/**/*"):
            needed -= path.stat().st_size if path.is_file() else 0
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise SystemFault(
                str(self.folder),
                f"{needed:,} bytes are to be downloaded, and {free:,} are free",
                f"make room, or choose another disk with {MODEL_BASE_VARIABLES[0]}",
            )

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
            reason, text = self.client.reason(error), first_line(str(error))
            if name:
                text = f"{name}: {text}"
                reason = "wrong" if reason == "absent" else reason
            raise self._error(reason, text) from error

    def _error(self, reason: Reason, text: str) -> DstrainError:
        """Return what a user can do about a hub's failure."""
        (other,) = (name for name in CLIENTS if name != self.hub)
        token = f"an access token in {self.client.token}"
        again = "run the same command again"
        kinds: dict[Reason, tuple[type[DstrainError], str, str]] = {
            "absent": (
                StateError,
                f"{self.label} has no such model, or no revision {self.revision}",
                f"a private one needs {token}",
            ),
            "denied": (
                SystemFault,
                f"{self.label} does not allow it",
                f"accept the model's terms there, and give {token}",
            ),
            "transport": (
                SystemFault,
                f"cannot be downloaded from {self.label}",
                f"complete files are kept: {again}",
            ),
            "wrong": (
                SystemFault,
                f"{self.label} did not give what it lists",
                f"that file was not kept: {again}",
            ),
        }
        kind, what, advice = kinds[reason]
        last = f"or put its files below {self.folder}, or try --hub {other}"
        return kind(self.source.named, f"{what}: {text}", advice, last)

    def _remove_empty_folder(self) -> None:
        """Leave nothing of a model of which nothing was fetched."""
        with suppress(OSError):
            if {path.name for path in self.folder.iterdir()} <= {LOCK, HOLDER}:
                for name in (LOCK, HOLDER):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a model's folder, waiting while another process fetches into it."""
    started, announced = time.monotonic(), False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(folder))
                break
            except StateError as busy:
                if not announced and time.monotonic() - started > QUIET_WAIT:
                    announced = True
                    logger.info(f"waiting: {busy.where} {busy.what}, which downloads")
                time.sleep(0.2)
        yield
