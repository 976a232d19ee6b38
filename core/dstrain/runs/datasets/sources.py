"""Find the datasets that the flags of a run name, and compare them with those that a plan of
the feature cache records.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.cache import is_cache
from dstrain.config import datasets_of
from dstrain.config.datasets import with_places
from dstrain.config.options import TrainConfig
from dstrain.data.tables import (
    Given,
    Source,
    ask,
    embedded_folder,
    find_source,
    installed_forms,
    join_sources,
)
from dstrain.errors import DstrainError, UsageError, about_dataset
from dstrain.models.hub import ID, may_be_id

PUBLISHED = re.compile(rf"{ID}(@[^:]+)?(:.+)?")
"""OWNER/NAME, OWNER/NAME@REVISION, either with :FOLDER behind it."""
PREFIXES = ("", "validation_")
"""How the options begin that name a dataset."""


def with_folders(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the folder and the metadata of each dataset in place
    of a file, or of what a plugin's form has a folder for, such as the id of a published
    dataset, which is downloaded unless it is here.

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
    if base is None or base.is_dir():
        return config
    is_id = is_published(base)
    if not is_id and not base.is_file():
        return config
    forms = installed_forms(config)
    is_read = config.stage != "train"
    given = Given(
        base,
        f"--{prefix}dataset",
        is_id,
        config.hub,
        is_needed=is_read,
        may_fetch=is_read and not config.dry_run,
    )
    try:
        found = ask(forms, given, config.dataset_form)
    except DstrainError as error:
        if is_id:
            note = f"--{name} {base} is no folder here, and is taken for the id of a dataset"
            error.help_lines = (*error.help_lines, note)
        raise
    if isinstance(found, Source):
        if getattr(config, metadata) is not None:
            what = f"cannot be combined with a file as --{name}; give one of them"
            raise UsageError(f"--{metadata}", what)
        places: dict[str, Any] = {name: found.base, metadata: base}
        return replace(config, **places)
    if found is not None:
        place: dict[str, Any] = {name: found}
        return replace(config, **place)
    return config


def is_published(base: Path) -> bool:
    """Return whether a dataset is named by its id on a hub: it is no file or folder."""
    is_id = PUBLISHED.fullmatch(str(base)) is not None
    return is_id and not os.path.lexists(base) and may_be_id(base)


def dataset_source(config: TrainConfig) -> Source | None:
    """Return where the rows of the datasets are; None for a run that reads none, and where
    a dry run names one that is not on this machine.
    """
    found = []
    for part in datasets_of(config):
        own = part.config
        base = own.dataset_base_path
        if base is None or config.stage == "train":
            return None
        if config.dry_run and is_published(base):
            return None
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
    if base is None or is_cache(base):
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


class NamedParts:
    """The datasets that a run names, as far as they are here."""

    def __init__(self, config: TrainConfig) -> None:
        """Find them; none where they are not several."""
        self._here: Sequence[OneHere] = (
            sources_of_parts(config) if config.dataset else ()
        )
        self._base = datasets_of(config)[0].config.dataset_base_path
        self._digest = cache(Source.digest)

    def first_changed(self, dataset: Mapping[str, Any]) -> Path | None:
        """Return where the first dataset is whose rows are not those that a plan records,
        or that it lacks; None if it has all, as far as they are here.

        Raises DstrainError for what cannot be read, and OSError.
        """
        recorded = dataset.get("parts", ({},))  # of a single one nothing is recorded
        if len(self._here) > len(recorded):
            return self._base
        # The last ones: that of --dataset_base_path is the first, and may be left out.
        for one, record in zip(self._here[::-1], recorded[::-1], strict=False):
            source = one.source
            # Plans of earlier versions have no digest of each.
            if source is None or "sha256" not in record:
                continue
            is_same_form = source.form == record.get("form", "table")
            if not (is_same_form or one.is_named or source.form == "table"):
                continue  # a table that is elsewhere
            if self._digest(source) != record["sha256"]:
                return source.path
        return None
