"""Find the datasets that the flags of a run name."""

import os
from contextlib import suppress

from dstrain.cache.store import MARKER
from dstrain.config.options.train import TrainConfig
from dstrain.data.forms.embedded import embedded_folder
from dstrain.data.forms.source import Source, find_source
from dstrain.errors import UsageError
from dstrain.runs.datasets.published import is_published


def dataset_source(config: TrainConfig) -> Source | None:
    """Return where the rows of the dataset are; None for a run that reads no dataset, and
    where a dry run names one that is not on this machine.
    """
    base = config.dataset_base_path
    if base is None or config.stage == "train":
        return None
    if config.dry_run and is_published(base):
        return None
    return find_source(base, config.dataset_metadata_path)


def source_here(config: TrainConfig) -> Source | None:
    """Return where the rows of the dataset are if it is here; stage 2 does without."""
    base = config.dataset_base_path
    metadata = config.dataset_metadata_path
    if metadata is not None:
        return find_source(metadata.parent, metadata) if metadata.is_file() else None
    if base is None or (base / MARKER).is_file():
        # A feature cache, as in DiffSynth-Studio's commands.
        return None
    with suppress(UsageError):
        return find_source(base)
    return None


def dataset_folders(config: TrainConfig) -> list[str]:
    """Return the real paths of the folders in which a run names files of its dataset."""
    folders = [config.dataset_base_path, *config.dataset_root, config.url_cache]
    found = [os.path.realpath(folder) for folder in folders if folder is not None]
    source = source_here(config)
    if source is not None and source.has_embedded:
        found.append(str(embedded_folder()))
    return found
