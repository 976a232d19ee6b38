"""Tell what the value of `--model_id` is: a published model, or a folder or file on this
machine. Imports no torch.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.models.hub import ModelSource, may_be_id
from dstrain.registry import ModelFamily

FLAG = "--model_id"
PUBLISHED = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@:]+))?")
"""ID or ID@REVISION; what begins with '/', './' or '../' is none."""


@dataclass(frozen=True)
class PublishedModel:
    """A model on a hub."""

    model_id: str
    revision: str = ""
    """A branch, tag or commit; '' for the hub's default."""


def located(value: str, families: Iterable[ModelFamily]) -> PublishedModel | Path:
    """Return what a value means: an existing path means itself, and OWNER/NAME else a
    published model.

    Raises UsageError for a path that is the id of a published model, too, and MissingFiles
    for what is neither a path nor an id.
    """
    families = list(families)
    path = Path(value)
    written = PUBLISHED.fullmatch(value)
    model_id, revision = written.groups(default="") if written else ("", "")
    published = PublishedModel(model_id, revision)
    knows = any(family.knows(model_id) for family in families)
    if not path.exists():
        if written and (knows or may_be_id(path)):
            return published
        known = [one for family in families for one in family.model_files]
        raise MissingFiles(
            value,
            f"does not exist{nearest(value, known)}",
            "a published model is written OWNER/NAME: `dstrain models` lists those that are known",
        )
    if written and _is_its_own_folder(path, published):
        return published
    if knows:
        kind = "folder" if path.is_dir() else "file"
        raise UsageError(
            FLAG,
            f"{value} is a published model and the path of a {kind}",
            f"for the {kind}, write ./{value}; for the published model, move the {kind}, or run this elsewhere",
        )
    return path


def absolute(value: str, families: Iterable[ModelFamily]) -> str:
    """Return a value as it means the same in another working directory; one that means
    nothing here stays as it is.
    """
    try:
        where = located(value, families)
    except (MissingFiles, UsageError):
        return value
    return value if isinstance(where, PublishedModel) else os.path.abspath(value)


def _is_its_own_folder(path: Path, published: PublishedModel) -> bool:
    """Return whether a path is where the files of the published model are kept."""
    folder = ModelSource(published.model_id).folder
    return folder.exists() and path.samefile(folder)
