"""The flags that filled a feature cache, as its plans record them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config.fields import Flag, flags
from dstrain.config.options.train import TrainConfig, options_affecting
from dstrain.config.serialize import as_flags
from dstrain.errors import CacheError

NOT_RECORDED = ("feature_cache", "output_path", "versions")
"""Places that are no part of the cache: it may be anywhere."""


def recorded_flags(config: TrainConfig) -> dict[str, Any]:
    """Return the flags of stage 1 that are not at their defaults as JSON data, without
    secrets, by name; folders of the dataset as absolute paths.
    """
    known = {flag.name: flag for flag in flags(TrainConfig)}
    recorded = {}
    for name, value in as_flags(config).items():
        flag = known.get(name)
        is_default = value in (None, [], False) or (
            flag is not None and getattr(config, name) == flag.default
        )
        is_of_start = name in options_affecting("start") or name in NOT_RECORDED
        if is_default or is_of_start:
            continue
        if flag is not None and flag.kind is Path:
            value = _absolute(value)
        recorded[name] = value
    return recorded


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [os.path.abspath(one) for one in value]
    return os.path.abspath(value)


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
    if not recorded:
        what = "does not record the flags that it was made with"
        raise CacheError(path, what, "run the command of stage 1 that filled it again")
    known = {flag.name: flag for flag in flags(TrainConfig)}
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
        values |= places
        task = str(values.get("task", "sft")).partition(":")[0]
        values |= {"task": f"{task}:data_process", "feature_cache": folder}
        return TrainConfig(**values, family_options=options, disabled_plugins=disabled)
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
