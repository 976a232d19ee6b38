"""A published model or dataset, and which of its files are on this machine."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dstrain.config.options import Hub
from dstrain.models.hub.clients import (
    DATASET_BASE_VARIABLE,
    MODEL_BASE_VARIABLES,
    Kind,
    dataset_base,
    model_base,
)
from dstrain.models.hub.record import Record, local_files, missing_shards, select

FLAG = "--model_id"
ID = r"\w[\w.-]*/\w[\w.-]*"
"""The pattern of an id: owner and name."""
USUAL_FOLDERS = ("data", "dataset", "datasets", "models")
"""A path that begins so is none of OWNER/NAME."""


def may_be_id(path: Path) -> bool:
    """Return whether what is no path on this machine may be the id of something published:
    the folder in which it would be is not there, and is none that is usual for files.
    """
    return path.parts[0] not in USUAL_FOLDERS and not os.path.lexists(path.parent)


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

    def has(self, pattern: str) -> bool:
        """Return whether there are files that a pattern means, by what the hub listed or
        by those on this machine.
        """
        record = Record.read(self.folder)
        listed = record.tree if record is not None else ()
        return bool(select(listed, pattern) or local_files(self.folder, pattern))

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
