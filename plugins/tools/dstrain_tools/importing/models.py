"""Tell which model a configuration trains."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dstrain.plugin import ModelFamily, UsageError, get_logger
from dstrain.plugin.commands import parse_origins, usable_families

from dstrain_tools.importing.context import Model
from dstrain_tools.importing.entries import Source
from dstrain_tools.importing.reading.tool import script_name
from dstrain_tools.importing.tables import Table

# A logger of dstrain, whose lines the command line shows.
logger = get_logger("dstrain.importing")
SDXL_NAMES = ("xl", "pony", "illustrious", "noob", "animagine")
"""Parts of the names of published files of SDXL."""
SDXL_KEYS = ("cache_text_encoder_outputs", "learning_rate_te1", "learning_rate_te2")
"""Keys of sd-scripts that are SDXL's alone, where no file of another model is named."""
ADVICE = "say which it is with --model: a family, or the id of a model, such as Qwen/Qwen-Image"


def model_of(
    source: Source,
    table: Table,
    chosen: str | None,
    disabled_plugins: Collection[str] = (),
) -> Model:
    """Return the model that a configuration trains.

    Raises UsageError if it cannot be told, or if no installed family trains it.

    Args:
        source: The configuration.
        table: What its tool's keys are.
        chosen: A family or a model id that the user names, which wins.
        disabled_plugins: Names of families that are not looked for.
    """
    families, broken = usable_families(disabled_plugins)
    for reason in broken:
        logger.warning(reason)
    given = {entry.key: entry.value for entry in source.run}
    where = source.files[0] if source.files else "FILE"
    if chosen is not None:
        return _chosen(chosen, families)
    if source.tool == "ai-toolkit":
        return _of_ai_toolkit(given, table, families, str(where))
    script = source.script or table.modules.get(str(given.get("network_module")), "")
    if source.tool == "kohya" and not script:
        script = _kohya_script(given)
    if not script:
        raise UsageError(where, "does not say which model it trains", ADVICE)
    name = script if source.tool == "diffsynth" else script_name(script)
    for row in table.models:
        if fnmatchcase(name, row["script"]):
            return _by_row(row, given, families, str(where), name)
    what = f"runs {script}, which trains a model that no installed family knows"
    raise UsageError(where, what, ADVICE)


def _chosen(name: str, families: Sequence[ModelFamily]) -> Model:
    """Return the model that --model names."""
    for family in families:
        if name == family.name:
            return Model(family, "", "--model")
    for family in families:
        if family.knows(name):
            _refuse_unsupported(family, name, "--model")
            return Model(family, name, "--model")
    raise _no_family(name, families, "--model")


def _by_row(
    row: Mapping[str, Any],
    given: Mapping[str, Any],
    families: Sequence[ModelFamily],
    where: str,
    script: str,
) -> Model:
    """Return the model that a row of the table is for."""
    if "unsupported" in row:
        raise _no_family(row["unsupported"], families, where)
    family = _family(row["family"], families, where)
    ids: Mapping[str, str] = row["ids"]
    key = row.get("key", "")
    word = str(given.get(key, row.get("default", "")))
    if key == "model_version" and key not in given:
        word = "edit-2509" if "edit_plus" in given else word
        word = "edit" if "edit" in given else word
    if word not in ids:
        what = f"--{key} {word} is a model that family {family.name} does not train"
        raise UsageError(where, what, f"it imports: {', '.join(ids)}")
    if not ids[word]:
        model_id = _of_origins(given, family, where)
        return Model(family, model_id, f"the folder of {Path(script).name}")
    is_larger = "720" in str(given.get("dit", "")) and "I2V-14B" in ids[word]
    model_id = ids[word].replace("480P", "720P") if is_larger else ids[word]
    files = (given.get(one) for one in ("pretrained_model_name_or_path", "dit"))
    named = next((str(one) for one in files if one), "")
    if family.knows(named):
        _refuse_unsupported(family, named, where)
        return Model(family, named, "pretrained_model_name_or_path")
    model_id = _told_by_name(row, named, model_id)
    return Model(family, model_id, f"--{key} {word}" if key else script)


def _told_by_name(row: Mapping[str, Any], named: str, model_id: str) -> str:
    """Return the id that the name of a file or model tells, else the one given."""
    for part, other in row.get("named", {}).items():
        if part in named.lower():
            return str(other)
    return model_id


def _of_origins(given: Mapping[str, Any], family: ModelFamily, where: str) -> str:
    """Return the id of the first published model that is told, '' for none; the flags
    that name the files stay as they are.
    """
    text = given.get("model_id_with_origin_paths")
    for model_id, pattern, _ in parse_origins(str(text) if text else None):
        name = family.unsupported([model_id, f"{model_id}:{pattern}"])
        if name:
            raise _no_family(name, [family], where)
        if family.variants_of(model_id):
            return model_id
    return ""


def _of_ai_toolkit(
    given: Mapping[str, Any], table: Table, families: Sequence[ModelFamily], where: str
) -> Model:
    """Return the model of `model.name_or_path`, or the published one of its
    `model.arch`.
    """
    named = str(given.get("model.name_or_path", ""))
    for family in families:
        if named in family.model_files:
            return Model(family, named, "model.name_or_path")
        if family.knows(named):
            _refuse_unsupported(family, named, where)
    arch = str(given.get("model.arch") or "").partition(":")[0]
    for name in ("flux", "xl"):
        if not arch and str(given.get(f"model.is_{name}")).lower() == "true":
            arch = f"sd{name}" if name == "xl" else name
    for row in table.models:
        if fnmatchcase(arch, row["arch"]):
            family = _family(row["family"], families, where)
            model_id = _told_by_name(row, named, row["ids"][""])
            if not model_id:
                raise UsageError(where, f"model.name_or_path is {named}", ADVICE)
            return Model(family, model_id, f"model.arch {arch}")
    raise _no_family(arch or named or "its model", families, where)


def _kohya_script(given: Mapping[str, Any]) -> str:
    """Return the script whose flags these are."""
    if "clip_g" in given:
        return "sd3_train_network.py"
    if "ae" in given or "t5xxl" in given:
        return "flux_train_network.py"
    base = str(given.get("pretrained_model_name_or_path", "")).lower()
    if not base:
        return ""
    is_sdxl = any(one in base for one in SDXL_NAMES) or any(
        key in given for key in SDXL_KEYS
    )
    return "sdxl_train_network.py" if is_sdxl else "train_network.py"


def _family(name: str, families: Sequence[ModelFamily], where: str) -> ModelFamily:
    for family in families:
        if family.name == name:
            return family
    what = f"its model is of family {name}, which is not installed"
    line = f"pip install -c constraints.txt ./plugins/{name}"
    raise UsageError(where, what, f"in the folder of the project, {line}")


def _refuse_unsupported(family: ModelFamily, model_id: str, where: str) -> None:
    name = family.unsupported([model_id])
    if name:
        raise _no_family(name, [family], where)


def _no_family(model: str, families: Sequence[ModelFamily], where: str) -> UsageError:
    """Return the error of a model that is not supported."""
    names = ", ".join(sorted(family.name for family in families)) or "none"
    what = f"{model} is not supported by an installed family: {names}"
    return UsageError(where, what, "`dstrain models` lists the models that are known")
