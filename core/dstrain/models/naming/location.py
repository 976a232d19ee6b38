"""Tell what the value of `--model_id` is: a published model, or a folder or file on this
machine; and its family, where nothing else names that. Imports no torch.
"""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from dstrain.errors import MissingFiles, UsageError, nearest
from dstrain.installed import how_to_have
from dstrain.models.hub import FLAG, ModelSource, may_be_id
from dstrain.registry import ModelFamily, usable_families
from dstrain.storage import read_limited

INDEX = "model_index.json"
"""The file of a published pipeline that names its class."""
GIVE_MODEL = "give --model"
"""How a command line names the family."""
PUBLISHED = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([^@:]+))?")
"""ID or ID@REVISION; what begins with '/', './' or '../' is none."""


def located(value: str, families: Iterable[ModelFamily]) -> ModelSource | Path:
    """Return what a value means: an existing path means itself, and OWNER/NAME else a
    published model, if it is known, has a revision, or there is no folder OWNER here.

    Raises UsageError for a path that is the id of a published model, too, and MissingFiles
    for what is neither a path nor an id.
    """
    families = list(families)
    path = Path(value)
    written = PUBLISHED.fullmatch(value)
    model_id, revision = written.groups(default="") if written else ("", "")
    published = ModelSource(model_id, revision)
    # A pattern of ids may fit the name of anyone's own file.
    knows = any(model_id in family.known_models for family in families)
    if not path.exists():
        if written and (revision or knows or may_be_id(path)):
            return published
        known = [one for family in families for one in family.model_files]
        advice = "a published model is written OWNER/NAME, beside a folder OWNER with @REVISION: see `dstrain models`"
        raise MissingFiles(value, f"does not exist{nearest(value, known)}", advice)
    own = published.folder
    if written and own.exists() and path.samefile(own):
        return published
    if knows:
        what = f"{value} is a published model, and a path"
        raise UsageError(FLAG, what, f"for the path, write ./{value}; else move it")
    return path


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
    if isinstance(where, ModelSource):
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
    if isinstance(where, ModelSource):
        if absent := how_to_have("model", where.model_id, disabled_plugins):
            raise UsageError(
                FLAG, f"no installed family lists {where.model_id}", absent
            )
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
