"""The flags that filled a feature cache, as its plans record them."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import as_flags, flags_by_name, parse_model_paths
from dstrain.config.datasets import with_absolute_paths
from dstrain.config.options import TrainConfig, options_affecting
from dstrain.config.serialize import option_words
from dstrain.console import shell_command
from dstrain.errors import UsageError
from dstrain.models.naming import absolute
from dstrain.registry import ModelFamily, load_family

NOT_RECORDED = frozenset(
    {"feature_cache", "output_path", "versions", *options_affecting("start")}
)
"""What is no part of the cache, which may be anywhere."""


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
        # Not `in (None, False)`, which 0 is, too.
        is_default = value is None or value is False or value == []
        is_default |= flag is not None and getattr(config, name) == flag.default
        if is_default or name in NOT_RECORDED:
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
    """Make the paths of --model_paths absolute."""
    # Where a secret was replaced, it may be no JSON any more.
    with suppress(UsageError):
        groups = parse_model_paths(recorded["model_paths"])
        recorded["model_paths"] = json.dumps(
            [one[0] if len(one) == 1 else one for one in map(_absolute, groups)]
        )


def _absolute(value: Any) -> Any:
    if isinstance(value, str):
        return os.path.abspath(value)
    return [os.path.abspath(one) for one in value]


def refill_command(flags: Mapping[str, Any], folder: Path) -> str:
    """Return the command of stage 1 with recorded flags, a stranger's maybe, as it is typed;
    '' without a model, or where a terminal would not show it as it is.
    """
    known = flags_by_name(TrainConfig)
    words = ["dstrain", "--feature_cache", str(folder)]
    for name, value in flags.items():
        if name in NOT_RECORDED:
            continue
        bare = known[name].bare if name in known else None
        for one in value if isinstance(value, list) else [value]:
            text = str(one)
            own = option_words(name, text in ("True", bare), text)
            words += ["-p", text] if name == "p" else own
    command = shell_command(words)
    return command if flags.get("model") and command.isprintable() else ""
