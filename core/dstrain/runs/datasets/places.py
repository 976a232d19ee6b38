"""Put the folders of datasets in place of what else names them."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import datasets_of
from dstrain.config.datasets import with_places
from dstrain.config.options import TrainConfig
from dstrain.data.forms import Given, Source, ask, offered_forms
from dstrain.data.forms.form import Form
from dstrain.errors import DstrainError, UsageError
from dstrain.models.hub import ID, may_be_id
from dstrain.registry import load_extensions

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


def installed_forms(config: TrainConfig) -> tuple[Form, ...]:
    """Return the forms of the plugins that a run uses."""
    return offered_forms(load_extensions(config.disabled_plugins), config)


def is_published(base: Path) -> bool:
    """Return whether a dataset is named by its id on a hub: it is no file or folder."""
    is_id = PUBLISHED.fullmatch(str(base)) is not None
    return is_id and not os.path.lexists(base) and may_be_id(base)
