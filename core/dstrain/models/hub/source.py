"""Find published model files on this machine, and download those that are missing."""

import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar, get_args

from dstrain.config.options import Hub
from dstrain.console import get_logger, number_of
from dstrain.errors import (
    DstrainError,
    MissingFiles,
    StateError,
    SystemFault,
    UsageError,
    nearest,
)
from dstrain.models.hub.clients import CLIENTS, Kind, first_line, is_absent, is_refused
from dstrain.models.hub.record import (
    Record,
    described_shards,
    local_files,
    missing_shards,
    select,
)
from dstrain.storage import file_mark
from dstrain.storage.locks import FolderLock

T = TypeVar("T")
FLAG = "--model_id"
DESCRIPTION = re.compile(r"(?:^|/)(?:tokenizer_)?config\.json$")
MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")
DATASET_BASE_VARIABLE = "DSTRAIN_DATASET_BASE_PATH"
HUB_VARIABLES = ("DSTRAIN_DOWNLOAD_SOURCE", "DIFFSYNTH_DOWNLOAD_SOURCE")
OFFLINE_VARIABLES = ("DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD")
ID = r"\w[\w.-]*/\w[\w.-]*"
"""The pattern of an id: owner and name."""
USUAL_FOLDERS = ("data", "dataset", "datasets", "models")
"""A path that begins so is none of OWNER/NAME."""
STAGING = ".fetching"
"""The folder, beside a model's files, of files that are not verified yet."""
QUIET_WAIT = 5.0
"""Seconds after which a process says that it waits for another one's download."""

logger = get_logger(__name__)


def may_be_id(path: Path) -> bool:
    """Return whether what is no path on this machine may be the id of something published:
    the folder in which it would be is not there, and is none that is usual for files.
    """
    return path.parts[0] not in USUAL_FOLDERS and not os.path.lexists(path.parent)


def model_base() -> Path:
    """Return the folder of published models, by default ./models."""
    for name in MODEL_BASE_VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    return Path("models")


def dataset_base() -> Path:
    """Return the folder of published datasets, by default ./data."""
    return Path(os.environ.get(DATASET_BASE_VARIABLE) or "data")


def hub_of_environment() -> Hub | None:
    """Return the hub that an environment variable names, None if none does; raises
    UsageError for one that there is not.
    """
    hubs: dict[str, Hub] = {hub: hub for hub in get_args(Hub)}
    for name in HUB_VARIABLES:
        value = os.environ.get(name, "").strip().lower()
        if value in hubs:
            return hubs[value]
        if value:
            what = f"is {value!r}; expected one of {', '.join(hubs)}"
            raise UsageError(f"variable {name}", what + nearest(value, hubs))
    return None


def chosen_hub(hub: Hub | None) -> Hub:
    """Return the hub to download from: that of --hub, else of a variable, else the default."""
    return hub or hub_of_environment() or "modelscope"


def offline() -> str:
    """Return the environment variable that forbids every request, or ''."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            return name
    return ""


@dataclass(frozen=True)
class ModelSource:
    """A published model, or a dataset."""

    model_id: str
    revision: str = ""
    """A branch, tag or commit; '' for the hub's default."""
    hub: Hub | None = "modelscope"
    """None forbids fetching."""
    kind: Kind = "model"

    @property
    def folder(self) -> Path:
        """Return the folder of its files."""
        base = model_base() if self.kind == "model" else dataset_base()
        return base / self.model_id

    @property
    def snapshot(self) -> Path | None:
        """Return its folder in the Hugging Face cache, which may lack files, if it has one."""
        # Imported when it is asked, since that is slow.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        found = partial(snapshot_download, self.model_id, repo_type=self.kind)
        with suppress(HFValidationError, LocalEntryNotFoundError):
            return Path(found(revision=self.revision or None, local_files_only=True))
        return None

    @property
    def base_variable(self) -> str:
        """Return the environment variable that names the folder of all such folders."""
        is_model = self.kind == "model"
        return MODEL_BASE_VARIABLES[0] if is_model else DATASET_BASE_VARIABLE

    def missing_shards(self, names: Collection[str]) -> list[str]:
        """Return the absent files that the names of others count; parts of datasets,
        which count from 0, are not looked at.
        """
        return missing_shards(names) if self.kind == "model" else []

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
    folder = source.folder
    record = Record.read(folder)
    if record is not None:
        if source.revision not in ("", record.revision, record.commit):
            return []
        names = select(record.tree, pattern)
        if names:
            return names if all(record.has(name, folder) for name in names) else []
    names = local_files(folder, pattern)
    return [] if source.revision or source.missing_shards(names) else names


def find_paths(source: ModelSource, pattern: str) -> list[Path]:
    """Return the files that a pattern means, from the first place that has all of them:
    the model's folder, the Hugging Face cache, a hub. Raises what `fetch` raises.
    """
    folder, names = source.folder, find_local(source, pattern)
    snapshot = None if names else source.snapshot
    if snapshot:
        names = local_files(snapshot, pattern)
        # Of a tokenizer, other programs may have fetched that alone.
        is_described = pattern.endswith("/") and all(map(DESCRIPTION.search, names))
        if source.missing_shards(names) or is_described:
            names = []
        folder = snapshot if names else folder
    names = names or fetch(source, pattern)
    return [folder / name for name in ([pattern] if pattern.endswith("/") else names)]


def _missing_error(source: ModelSource, pattern: str) -> MissingFiles:
    """Return the error that says which files are missing, and why they are not
    downloaded.
    """
    what = "not all of its files are on this machine"
    shards = source.missing_shards(local_files(source.folder, pattern))
    if shards:
        what = described_shards(shards)
    if source.revision:
        what += f", or not at revision {source.revision}"
    advice = f"{source.kind}s are searched for in the folder that {source.base_variable} names"
    if offline():
        advice = f"nothing is downloaded because {offline()} is set; unset it"
    return MissingFiles(source.folder / pattern, what, advice)


def fetch(source: ModelSource, pattern: str) -> list[str]:
    """Return the files that a pattern means, as `find_local` does; download what is
    missing.

    Of several processes on a machine one downloads, and the others wait for it. Raises
    StateError if the hub has no such model, revision or file, or nothing may be
    downloaded; SystemFault if the hub or this machine fails.
    """
    names = find_local(source, pattern)
    if names:
        return names
    if source.hub is None or offline():
        raise _missing_error(source, pattern)
    # The id becomes a path, which must lie in the folder of models.
    if not re.fullmatch(ID, source.model_id):
        what = f"{source.model_id!r} is not a model id; expected OWNER/NAME"
        raise UsageError("--model_id_with_origin_paths", what)
    return _Download(source, source.hub).run(pattern)


def fetch_dataset(
    dataset_id: str, revision: str, hub: Hub | None, folder: str, may_fetch: bool
) -> Path | None:
    """Return the folder of a published dataset, which is downloaded unless it is here;
    None if it is not here, and may not be. Raises as `fetch`. A revision or folder of ''
    is the hub's default, or all of it.
    """
    source = ModelSource(dataset_id, revision, chosen_hub(hub), "dataset")
    pattern = f"{folder.rstrip('/')}/" if folder else ""
    if not find_local(source, pattern):
        if not may_fetch:
            return None
        fetch(source, pattern)
    return source.folder / folder


class _Download:
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
            staged = folder / STAGING / name
            # Clients continue a file, or parts of it, whose names start with its own.
            parts = staged.parent.glob(f"{staged.name}*")
            size = record.tree[name].size - sum(part.stat().st_size for part in parts)
            total += max(0, size)
        self._announce(missing, total)
        # What is not recorded of a killed run is compared again, not downloaded again.
        try:
            for name in missing:
                staged = folder / STAGING / name
                path = folder / name
                at = record.commit or record.revision
                staging = folder / STAGING
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
        shutil.rmtree(folder / STAGING, ignore_errors=True)

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
