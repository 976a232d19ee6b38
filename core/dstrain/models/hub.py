"""Published model files: those that are here are used; others are fetched once per
machine, verified, and recorded.
"""

import difflib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dstrain.config.schema import Hub
from dstrain.console import get_logger
from dstrain.errors import DstrainError, StateError, SystemFault, UsageError
from dstrain.models.hub_clients import CLIENTS, Client, HubFault, Listing
from dstrain.models.hub_record import (
    Kept,
    Record,
    beside,
    here,
    kept_file,
    missing_shards,
    note_marks,
    same,
    select,
)
from dstrain.storage.files import LOCK, lock

logger = get_logger(__name__)


MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")
OFFLINE_VARIABLES = ("DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD")
STAGING = ".fetching"
"""Folder, beside a model's files, of what is not whole yet."""
TOLD = 100_000_000
"""Bytes from which on a file is worth a line of its own."""
PATIENCE = 5.0
"""Seconds after which a process says that it waits for another one's download."""


def model_base() -> Path:
    """The folder that holds model ids: $DSTRAIN_MODEL_BASE_PATH, or the reference's
    name for it, or ./models.
    """
    return Path(
        next(
            (os.environ[name] for name in MODEL_BASE_VARIABLES if os.environ.get(name)),
            "models",
        )
    )


def offline() -> str:
    """The environment variable that forbids every request, or ''."""
    set_ones = (
        name
        for name in OFFLINE_VARIABLES
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
    )
    return next(set_ones, "")


@dataclass(frozen=True)
class ModelSource:
    """A published model: its id, a revision (a branch, tag or commit; '' for the hub's
    usual one), and its hub.

    hub: None if nothing may be fetched.
    """

    model_id: str
    revision: str = ""
    hub: Hub | None = "modelscope"

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return model_base() / self.model_id

    @property
    def named(self) -> str:
        """The model as a user writes it."""
        return f"{self.model_id}@{self.revision}" if self.revision else self.model_id


def find_local(source: ModelSource, pattern: str, companions: bool = True) -> list[str]:
    """The files, below the origin's folder, that a pattern means; [] unless all of them
    are here.

    What was fetched is compared with its record. Files without a record are taken as
    they are, but for shards that are not all there, and for a revision, which nothing
    tells of them. companions: whether `config.json` and the like that the hub has
    beside them must be here too. Raises StateError for a file that was fetched and
    changed since.
    """
    folder, record = source.folder, Record.read(source.folder)
    if record is not None and not record.is_of(source.revision):
        return []
    names = select(record.tree, pattern) if record is not None else []
    if record is not None and names:
        wanted = [*names, *(beside(record.tree, pattern) if companions else ())]
        if not all(record.holds(name, folder) for name in wanted):
            return []
        note_marks(record, wanted, folder)
        return names
    names = here(folder, pattern)
    return [] if source.revision or missing_shards(names) else names


def fetch(source: ModelSource, pattern: str) -> list[str]:
    """The files that a pattern means, as `find_here`; what is not here is fetched,
    unless that is switched off.

    Of several processes on a machine one fetches, and the others wait for it. Raises
    StateError if the hub has no such model, revision or file, or nothing may be
    fetched; SystemFault if the hub or this machine fails.
    """
    names = find_local(source, pattern)
    if names:
        return names
    if source.hub is None or offline():
        raise missing_error(source, pattern)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source.model_id) or {".", ".."} & set(
        source.model_id.split("/")
    ):
        raise UsageError(
            "--model_id_with_origin_paths",
            f"{source.model_id!r} is no model id; want OWNER/NAME",
        )
    with _alone(source.folder):
        return find_local(source, pattern) or _fetch(
            source, pattern, CLIENTS[source.hub]()
        )


def missing_error(source: ModelSource, pattern: str) -> StateError:
    """The error that says which files are not here, and why they are not fetched."""
    where, folder = str(source.folder / pattern), source.folder
    found, record = here(folder, pattern), Record.read(folder)
    lacking = missing_shards(found)
    what = "no file matches"
    if found and source.revision:
        what = f"what is here is not known to be of revision {source.revision}"
    elif lacking:
        what = f"{len(lacking)} shards are missing, such as {lacking[0]}"
    elif record is not None and select(record.tree, pattern):
        what = "not all files are here"
    help_lines = [
        f"models are looked for below {MODEL_BASE_VARIABLES[0]} (now {model_base()})"
    ]
    if offline():
        help_lines += [
            f"nothing is fetched, since {offline()} is set; without it, they are, from --hub"
        ]
    return StateError(where, what, *help_lines)


def _fetch(source: ModelSource, pattern: str, client: Client) -> list[str]:
    """Fetch what a pattern means and what belongs to it; the folder is this process's
    alone.
    """
    folder, old = source.folder, Record.read(source.folder)
    before = (
        old
        if old is not None and old.hub == source.hub and not source.revision
        else None
    )
    asked = (
        before.revision
        if before is not None
        else source.revision or client.default_revision
    )
    try:
        listing = _listing(source.model_id, before, asked, client)
        names = select(listing.files, pattern)
        _check_listing(source, pattern, asked, listing, names)
        kept = old.kept if old is not None else {}
        record = Record(
            source.hub or "",
            source.model_id,
            asked,
            listing.commit,
            listing.files,
            kept,
        )
        record = _adopted(record, {*names, *beside(listing.files, pattern)}, folder)
        lacking = [
            name
            for name in (*beside(listing.files, pattern), *names)
            if not record.holds(name, folder)
        ]
        _bring(record, list(dict.fromkeys(lacking)), client, source)
    except HubFault as fault:
        _tidy(folder)
        names = find_local(source, pattern, companions=False)
        if fault.kind != "transport" or not names:
            raise _error(fault, source, asked, client) from fault
        logger.warning(
            f"{source.named}: {source.hub} cannot be reached; what is here is used: {fault.reason}"
        )
    except DstrainError:
        _tidy(folder)
        raise
    except OSError as error:
        help_line = (
            "what was fetched is kept: make room, or choose another disk with "
            + MODEL_BASE_VARIABLES[0]
        )
        raise SystemFault(
            str(folder), f"cannot be written: {error.strerror or error}", help_line
        ) from error
    return names


def _listing(
    model_id: str, before: Record | None, asked: str, client: Client
) -> Listing:
    """A model's files at the commit that is here already, since a folder holds one
    revision, unless it is gone.
    """
    if before is not None and before.commit:
        try:
            return client.listing(model_id, before.commit)
        except HubFault as fault:
            if fault.kind != "absent":
                raise
    return client.listing(model_id, asked)


def _check_listing(
    source: ModelSource, pattern: str, asked: str, listing: Listing, names: list[str]
) -> None:
    """Refuse a list with a path outside the model's folder, and a pattern that means
    none of its files.
    """
    for name in listing.files:
        parts = PurePosixPath(name).parts
        if (
            name.startswith("/")
            or ".." in parts
            or "\\" in name
            or not name.isprintable()
        ):
            raise SystemFault(
                source.model_id,
                f"the hub lists a file that would lie outside its folder: {name!r}",
            )
    if not names:
        known = [name for name in listing.files if not Path(name).name.startswith(".")]
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
        raise StateError(
            f"{source.named}:{pattern}",
            f"no file of it on {source.hub} at revision {asked} matches",
            f"there are, of {len(known)}: {', '.join(near) or 'none'}",
        )


def _adopted(record: Record, wanted: Iterable[str], folder: Path) -> Record:
    """The record with files that are here and are what the hub lists; raises StateError
    for others in their place.

    A file that was fetched at another revision, and not changed since, is no such
    other.
    """
    kept = dict(record.kept)
    for name in wanted:
        path = folder / name
        if record.holds(name, folder) or not path.exists():
            continue
        if same(path, record.tree[name]):
            kept[name] = kept_file(path, record.tree[name])
        elif name not in kept:
            what = f"is here, and is not the file that {record.hub} has at revision {record.revision}"
            raise StateError(
                str(path),
                what,
                "move it away, and that one is fetched; nothing is written over it",
            )
    return replace(record, kept=kept)


def _bring(
    record: Record, names: list[str], client: Client, source: ModelSource
) -> None:
    """Fetch files one after the other, each verified before it gets its name; then the
    record is written.
    """
    folder, total = source.folder, sum(record.tree[name].size for name in names)
    begun = {
        path
        for name in names
        for path in _staging(record, name, folder).rglob("*")
        if path.is_file()
    }
    lacking = total - sum(path.stat().st_size for path in begun)
    record.write(
        folder
    )  # so that a folder with some of its files is known to be short of others
    free = shutil.disk_usage(folder).free
    if lacking > free:
        help_line = f"make room, or choose another disk with {MODEL_BASE_VARIABLES[0]}"
        raise SystemFault(
            str(folder),
            f"{lacking:,} bytes are to be fetched, and {free:,} are free",
            help_line,
        )
    if names:
        logger.info(
            f"dstrain: fetching {len(names)} files, {total:,} bytes, of {source.named} from {source.hub} to {folder}"
        )
    new: dict[str, Kept] = {}
    try:
        for number, name in enumerate(names, 1):
            size = record.tree[name].size
            if size >= TOLD:
                logger.info(
                    f"dstrain: fetching {name}, {size:,} bytes ({number} of {len(names)})"
                )
            new[name] = _one(record, name, client, folder)
    finally:
        if new:
            replace(record, kept={**record.kept, **new}).write(folder)
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def _staging(record: Record, name: str, folder: Path) -> Path:
    """Where a file is fetched to: by its content, since what is left of another
    revision's is no part of it.
    """
    content = (
        record.tree[name].digest.partition(":")[2] or record.commit or record.revision
    )
    return folder / STAGING / content.replace("/", "-")


def _one(record: Record, name: str, client: Client, folder: Path) -> Kept:
    """Fetch one file beside its place, compare it with what the hub lists, and move it
    there.
    """
    listed, staging = record.tree[name], _staging(record, name, folder)
    try:
        client.download(
            record.model_id, record.commit or record.revision, name, listed, staging
        )
    except HubFault as fault:
        kind = "wrong" if fault.kind == "absent" else fault.kind
        raise HubFault(kind, f"{name}: {fault.reason}") from fault
    staged = staging / name
    if not same(staged, listed):
        shutil.rmtree(staging)
        raise HubFault(
            "wrong",
            f"{name}: its size or digest is not {listed.size} bytes, {listed.digest[:23]}...",
        )
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    staged.replace(folder / name)
    return kept_file(folder / name, listed)


def _error(
    fault: HubFault, source: ModelSource, asked: str, client: Client
) -> DstrainError:
    """What a user is told of a hub's fault."""
    hub, other = (
        f"{source.hub} ({client.place})",
        next(name for name in CLIENTS if name != source.hub),
    )
    files = f"or put its files below {source.folder}, or try --hub {other}"
    told: Mapping[str, DstrainError] = {
        "absent": StateError(
            source.named,
            f"{hub} has no such model, or no revision {asked}: {fault.reason}",
            f"a private one needs an access token in {client.token}",
            files,
        ),
        "denied": SystemFault(
            source.named,
            f"{hub} does not allow it: {fault.reason}",
            f"accept the model's terms there, and give an access token in {client.token}",
            files,
        ),
        "transport": SystemFault(
            source.named,
            f"cannot be fetched from {hub}: {fault.reason}",
            "what was fetched is kept: run the same command again",
            files,
        ),
        "wrong": SystemFault(
            source.named,
            f"{hub} did not give what it lists: {fault.reason}",
            "that file was not kept: run the same command again",
            files,
        ),
    }
    return told[fault.kind]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a model's folder for this process, waiting for another one that fetches into
    it.
    """
    started, told = time.monotonic(), False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(folder))
                break
            except StateError as busy:
                if not told and time.monotonic() - started > PATIENCE:
                    told = True
                    logger.info(
                        f"dstrain: waiting: {busy.where} {busy.what}, which fetches"
                    )
                time.sleep(0.2)
        yield


def _tidy(folder: Path) -> None:
    """Leave no empty folders of a model that was not to be had."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {LOCK}:
            (folder / LOCK).unlink()
            folder.rmdir()
            folder.parent.rmdir()
