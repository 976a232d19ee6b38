"""Tell the family of a model by the word that names it, where nothing else does."""

import json
from collections.abc import Collection
from pathlib import Path

from dstrain.errors import UsageError, nearest
from dstrain.models.naming.location import FLAG, PublishedModel, located
from dstrain.registry import ModelFamily, usable_families
from dstrain.storage import read_limited

INDEX = "model_index.json"
"""The file of a published pipeline that names its class."""
GIVE_MODEL = "give --model"
"""How a command line names the family."""


def family_of(
    value: str,
    disabled_plugins: Collection[str] = (),
    in_help: bool = False,
    advice: str = GIVE_MODEL,
) -> ModelFamily | None:
    """Return the only installed family that a model can be of: by its id, by
    model_index.json in its folder, or by the keys of its weights.

    Raises UsageError that names the candidates if there is not exactly one, and what
    `located` raises.

    Args:
        value: The value of `--model_id`.
        disabled_plugins: Names of plugins, or of distributions, to leave out.
        in_help: The keys are not read, which takes seconds; None stands for what only they
            could tell.
        advice: How the caller's user names the family, at the beginning of a sentence.
    """
    families, broken = usable_families(disabled_plugins)
    where = located(value, families)
    if isinstance(where, PublishedModel):
        found = [family for family in families if family.knows(where.model_id)]
    else:
        name = pipeline_class(where)
        found = [family for family in families if name in family.pipeline_classes]
        if not found and in_help:
            return None
        if not found:
            # Imported here, since it imports torch.
            from dstrain.models.naming.folders import families_of

            found = families_of(where, families)
    if len(found) == 1:
        return found[0]
    installed = ", ".join(family.name for family in families) or "none"
    if found:
        names = ", ".join(family.name for family in found)
        what = f"{value} can be of several families: {names}"
        raise UsageError("--model", f"{what}; choose one", *broken)
    if isinstance(where, PublishedModel):
        known = [model_id for family in families for model_id in family.model_files]
        what = f"no installed family lists {where.model_id}{nearest(where.model_id, known)}"
        advice = f"`dstrain models` lists what is known; {advice} for another model of a family"
    else:
        what = f"{value} has no weights of an installed family"
        advice = f"{advice} to say of which it is"
    raise UsageError(FLAG, what, f"{advice}; families: {installed}", *broken)


def pipeline_class(path: Path) -> str:
    """Return the class that model_index.json in a folder names; '' if there is none."""
    try:
        name = json.loads(read_limited(path / INDEX))["_class_name"]
    except (OSError, ValueError, LookupError, TypeError, UsageError, RecursionError):
        return ""
    return str(name)
