"""The flags that filled a feature cache, as its plans record them."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import (
    Flag,
    as_flags,
    flags_by_name,
    parse_model_paths,
    split_commas,
)
from dstrain.config.datasets import with_absolute_paths
from dstrain.config.fields import check_value
from dstrain.config.options import TrainConfig, options_affecting
from dstrain.config.serialize import MODEL_FILES
from dstrain.errors import CacheError, UsageError
from dstrain.models.naming import absolute
from dstrain.registry import ModelFamily, load_family

NOT_RECORDED = ("feature_cache", "output_path", "versions")
"""Places that are no part of the cache: it may be anywhere."""


def recorded_flags(config: TrainConfig) -> dict[str, Any]:
    """Return the flags of stage 1 that are not at their defaults as JSON data, without
    secrets, by name; paths are absolute, since commands that read them may run elsewhere.
    """
    # A command that runs both stages fills the cache as stage 1 alone does.
    config = replace(config, task=f"{config.task_name}:data_process")
    known = flags_by_name(TrainConfig)
    paths = {flag.name for flag in known.values() if flag.kind is Path}
    family = _family_of(config)
    if family is not None:
        paths |= _path_options(family)
    recorded = {}
    for name, value in as_flags(config).items():
        flag = known.get(name)
        is_default = value in (None, [], False) or (
            flag is not None and getattr(config, name) == flag.default
        )
        is_of_start = name in options_affecting("start") or name in NOT_RECORDED
        if is_default or is_of_start:
            continue
        recorded[name] = _absolute(value) if name in paths else value
    if "dataset" in recorded:
        recorded["dataset"] = [with_absolute_paths(one) for one in recorded["dataset"]]
    if "model_id" in recorded and family is not None:
        recorded["model_id"] = absolute(recorded["model_id"], [family])
    if "model_paths" in recorded:
        _record_model_paths(recorded)
    return recorded


def _family_of(config: TrainConfig) -> ModelFamily | None:
    """Return the family; None for a run that a library made, of a family that no plugin
    provides.
    """
    try:
        return load_family(config.model, config.disabled_plugins)
    except UsageError:
        return None


def _path_options(family: ModelFamily) -> set[str]:
    """Return the names of the family's options that are paths."""
    return {
        option.name
        for option in family.options
        if option.component and not option.is_flag
    }


def _record_model_paths(recorded: dict[str, Any]) -> None:
    """Make the paths of --model_paths absolute, and those of --offload_models, which names
    components as --model_paths does.
    """
    # Where a secret was replaced, it may be no JSON any more.
    with suppress(UsageError):
        groups = parse_model_paths(recorded["model_paths"])
        recorded["model_paths"] = json.dumps(
            [one[0] if len(one) == 1 else one for one in map(_absolute, groups)]
        )
        typed = {path for group in groups for path in group}
        names = split_commas(recorded.get("offload_models"))
        if typed & set(names):
            moved = [_absolute(one) if one in typed else one for one in names]
            recorded["offload_models"] = ",".join(moved)


def _absolute(value: Any) -> Any:
    if isinstance(value, str):
        return os.path.abspath(value)
    return [os.path.abspath(one) for one in value]


def config_of(
    record: Mapping[str, Any], path: Path, folder: Path, **places: Any
) -> TrainConfig:
    """Return the configuration of stage 1 that makes a plan again.

    Args:
        record: The plan's record.
        path: The plan's file, for errors.
        folder: The cache.
        places: Options in place of recorded ones: where models and data are here.

    Raises CacheError for a plan that records no flags, or flags that there are not.
    """
    recorded = dict(record["about"].get("config") or {})
    if "model" not in recorded:
        what = "does not record the flags that it was made with"
        raise CacheError(path, what, "run the command of stage 1 that filled it again")
    known = flags_by_name(TrainConfig)
    values: dict[str, Any] = {}
    options: dict[str, str] = {}
    try:
        disabled = tuple(name.removeprefix("no:") for name in recorded.pop("p", ()))
        for name, value in recorded.items():
            if name in NOT_RECORDED or value is None:
                continue
            if name in known:
                values[name] = _value(known[name], value)
            elif value is not False:
                options[name] = str(value)
        for name, value in values.items():
            check_value(known[name], value)
        if "model_id" in places:
            # It is the whole model, which recorded files would replace in part.
            for name in MODEL_FILES:
                values.pop(name, None)
        values |= places
        task = str(values.get("task", "sft")).partition(":")[0]
        values |= {"task": f"{task}:data_process", "feature_cache": folder}
        return TrainConfig(**values, family_options=options, disabled_plugins=disabled)
    except UsageError as error:
        what = f"records flags that cannot be used: {error.where}: {error.what}"
        raise CacheError(path, what) from error
    except (TypeError, ValueError, AttributeError) as error:
        what = f"records flags that cannot be used: {error}"
        raise CacheError(path, what) from error


def _value(flag: Flag, value: Any) -> Any:
    if flag.many:
        return tuple(_value_of(flag, one) for one in value)
    return _value_of(flag, value)


def _value_of(flag: Flag, value: Any) -> Any:
    if flag.kind is Path and not (flag.bare is not None and value == flag.bare):
        return Path(value)
    return value
