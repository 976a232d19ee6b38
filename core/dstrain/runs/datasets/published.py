"""Put datasets on this machine, and their folders in place of what else names them."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import datasets_of
from dstrain.config.datasets import with_places
from dstrain.config.options import TrainConfig
from dstrain.console import get_logger
from dstrain.data.forms import ARROW, PARQUET
from dstrain.errors import DstrainError, UsageError
from dstrain.models.hub import ID, ModelSource, chosen_hub, fetch, find_local, may_be_id

PUBLISHED = re.compile(rf"({ID})(?:@([^:]+))?(?::(.+))?")
"""OWNER/NAME, OWNER/NAME@REVISION, either with :FOLDER behind it."""
PREFIXES = ("", "validation_")
"""How the options begin that name a dataset."""

logger = get_logger(__name__)


def with_folders(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the folder and the metadata of each dataset in place
    of a file, or of the id of a published dataset, which is downloaded unless it is here.

    A stage 2 and a dry run download nothing: what is not here keeps its id. Raises
    DstrainError for a dataset that cannot be downloaded.
    """
    for prefix in PREFIXES:
        config = _with_folder(config, prefix)
    entries = []
    for entry in config.dataset:
        (part,) = datasets_of(replace(config, dataset_base_path=None, dataset=(entry,)))
        found = _with_folder(part.config, "")
        places = (found.dataset_base_path, found.dataset_metadata_path)
        entries.append(with_places(entry, *places))
    return replace(config, dataset=tuple(entries))


def _with_folder(config: TrainConfig, prefix: str) -> TrainConfig:
    name, metadata = f"{prefix}dataset_base_path", f"{prefix}dataset_metadata_path"
    base: Path | None = getattr(config, name)
    if base is None:
        return config
    if base.is_file() and base.suffix in (PARQUET, ARROW):
        if getattr(config, metadata) is not None:
            what = f"cannot be combined with a file as --{name}; give one of them"
            raise UsageError(f"--{metadata}", what)
        places: dict[str, Any] = {name: base.parent, metadata: base}
        return replace(config, **places)
    if is_published(base):
        folder = _local_folder(config, f"--{name}", str(base))
        if folder is not None:
            place: dict[str, Any] = {name: folder}
            return replace(config, **place)
    return config


def is_published(base: Path) -> bool:
    """Return whether a dataset is named by its id on a hub: it is no file or folder."""
    is_id = PUBLISHED.fullmatch(str(base)) is not None
    return is_id and not os.path.lexists(base) and may_be_id(base)


def _local_folder(config: TrainConfig, flag: str, text: str) -> Path | None:
    """Return the folder of a published dataset on this machine; None if it is not here,
    and this run downloads nothing.
    """
    found = PUBLISHED.fullmatch(text)
    assert found is not None
    dataset_id, revision, part = found.groups(default="")
    if ".." in part.split("/") or part.startswith("/"):
        what = f"{part!r} leads out of the dataset; expected a folder of it"
        raise UsageError(flag, what)
    pattern = f"{part.rstrip('/')}/" if part else ""
    source = ModelSource(dataset_id, revision, chosen_hub(config.hub), "dataset")
    if not find_local(source, pattern):
        if config.stage == "train" or config.dry_run:
            return None
        try:
            fetch(source, pattern)
        except DstrainError as error:
            note = (
                f"{flag} {text} is no folder here, and is taken for the id of a dataset"
            )
            error.help_lines = (*error.help_lines, note)
            raise
    return source.folder / part
