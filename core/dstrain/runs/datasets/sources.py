"""Find the datasets that the flags of a run name."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstrain.cache import MARKER
from dstrain.config import datasets_of
from dstrain.config.options import TrainConfig
from dstrain.data.forms import (
    Source,
    embedded_folder,
    find_source,
    join_sources,
)
from dstrain.errors import UsageError, about_dataset
from dstrain.runs.datasets.places import installed_forms, is_published


def dataset_source(config: TrainConfig) -> Source | None:
    """Return where the rows of the datasets are; None for a run that reads none, and where
    a dry run names one that is not on this machine.
    """
    found = []
    for part in datasets_of(config):
        base = part.config.dataset_base_path
        if base is None or config.stage == "train":
            return None
        if config.dry_run and is_published(base):
            return None
        own = part.config
        with about_dataset(part.name):
            found.append(source_of(own, base, own.dataset_metadata_path))
    return _joined(config, found)


def source_of(config: TrainConfig, base: Path, metadata: Path | None) -> Source:
    """Return where the rows of one dataset are; raises as `find_source`."""
    forms, chosen = installed_forms(config), config.dataset_form
    return find_source(
        base, metadata, roots=config.dataset_root, forms=forms, chosen=chosen
    )


def source_here(config: TrainConfig) -> Source | None:
    """Return where the rows of the datasets are if all are here; stage 2 does without."""
    found = sources_of_parts(config)
    here = [one.source for one in found if one.source is not None]
    return _joined(config, here) if here and len(here) == len(found) else None


@dataclass(frozen=True)
class OneHere:
    """One of the datasets that a run names."""

    source: Source | None
    """None if it is not here."""
    is_named: bool
    """Whether its metadata is named, and not looked for."""


def sources_of_parts(config: TrainConfig) -> list[OneHere]:
    """Return where the rows of each dataset are."""
    return [
        OneHere(_one_here(part.config), part.config.dataset_metadata_path is not None)
        for part in datasets_of(config)
    ]


def _joined(config: TrainConfig, sources: list[Source]) -> Source:
    # A single entry of --dataset is joined, too, as its rows are.
    return join_sources(sources) if config.dataset else sources[0]


def _one_here(config: TrainConfig) -> Source | None:
    base = config.dataset_base_path
    metadata = config.dataset_metadata_path
    if metadata is not None:
        is_here = metadata.is_file()
        return source_of(config, metadata.parent, metadata) if is_here else None
    if base is None or (base / MARKER).is_file():
        # A feature cache, as in DiffSynth-Studio's commands.
        return None
    with suppress(UsageError):
        return source_of(config, base, None)
    return None


def dataset_folders(config: TrainConfig) -> list[str]:
    """Return the real paths of the folders in which a run names files of its datasets."""
    folders = [one for of_part in folders_of_parts(config) for one in of_part]
    return list(dict.fromkeys(folders))


def folders_of_parts(config: TrainConfig) -> list[list[str]]:
    """Return the real paths of the folders in which each dataset names files."""
    found = []
    for part in datasets_of(config):
        own = part.config
        kept = [form.keeps for form in installed_forms(own)]
        places = [own.dataset_base_path, *own.dataset_root, *kept]
        folders = [os.path.realpath(place) for place in places if place is not None]
        source = _one_here(own)
        if source is not None and source.has_contents:
            folders.append(str(embedded_folder()))
        found.append(folders)
    return found
