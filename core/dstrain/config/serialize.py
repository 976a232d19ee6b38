"""Write a configuration down without its secrets, and read what a run wrote."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config.fields import Flag
from dstrain.config.options import (
    GenerateConfig,
    ModelChoice,
    TrainConfig,
    options_affecting,
)
from dstrain.config.plugin_options import changed, flags, flags_by_name, plugin_flags
from dstrain.config.plugin_records import records
from dstrain.console import redacted, shell_command
from dstrain.errors import StateError, UsageError
from dstrain.installed import how_to_have, is_default_of_absent
from dstrain.storage import write_file


def command_line(config: TrainConfig, **changes: Any) -> str:
    """Return the command that runs a configuration with these options changed, as it is
    typed; with a launcher, if one started this process.
    """
    return shell_command(command_words(config, **changes))


def command_words(config: TrainConfig, **changes: Any) -> list[str]:
    """Return the words of `command_line`."""
    config = replace(config, **changes)
    words = ["dstrain", "--model", config.model]
    size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if size != "1" and config.stage != "data_process":
        words[:1] = ["torchrun", "--nproc_per_node", size, "-m", "dstrain"]
    for flag in flags(TrainConfig):
        if "origin" in flag.affects:
            continue
        value = getattr(config, flag.name)
        if flag.is_switch and value is False:
            words.append(f"--no_{flag.name}")
        if flag.required or value == flag.default or value is False:
            continue
        for one in value if flag.many else (value,):
            stands_alone = one is True or (flag.bare is not None and one == flag.bare)
            words += option_words(flag.name, stands_alone, str(one))
    for name, text in config.family_options.items():
        words += option_words(name, text == str(True), text)
    for name in config.disabled_plugins:
        words += ["-p", f"no:{name}"]
    return words


def new_start() -> dict[str, Any]:
    """Return the options of one start of a run at their defaults."""
    chosen = [flag for flag in flags(TrainConfig) if "start" in flag.affects]
    return {**{one.name: one.default for one in chosen}, "resume_from_checkpoint": None}


def refill_advice(config: TrainConfig) -> str:
    """Return the command of stage 1 that fills the feature cache of a run, in words."""
    stage_1 = f"{config.task_name}:data_process"
    again = f"run the command that filled it, with --task {stage_1}"
    if config.stage == "train" and config.feature_cache is None:
        return f"--dataset_base_path is the cache here: {again}, or name a cache with --feature_cache"
    if config.dataset_base_path is None:
        return f"to fill it, {again}"
    return "to fill it, run: " + command_line(config, task=stage_1, **new_start())


def option_words(name: str, stands_alone: bool, text: str) -> list[str]:
    """Return the words of an option with its value, unless it stands alone."""
    if stands_alone:
        return [f"--{name}"]
    # As one word, where it would be taken for an option.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


MODEL_FILES = ("model_id", "model_paths", "model_id_with_origin_paths")
"""The options that name model files."""
CONFIG = "logs/config.json"
"""Where a run writes its configuration, below its output folder."""
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
"""What is a number in TOML, too; any other is written as text, as on a command line."""


def as_flags(config: ModelChoice) -> dict[str, Any]:
    """Return the value of every option as JSON, including the family's and -p; None
    stands for an absent one. A plugin's is left out where it is the default.
    """
    of_plugins = plugin_flags(type(config)).keys() - config.plugin_options.keys()
    values = {
        flag.name: getattr(config, flag.name)
        for flag in flags(type(config))
        if flag.name not in of_plugins and "origin" not in flag.affects
    }
    values |= config.family_options
    values["p"] = tuple(f"no:{name}" for name in config.disabled_plugins)
    return {name: _plain(value) for name, value in values.items()}


def assignment(option: str, value: Any, known: Mapping[str, Flag]) -> str:
    """Return an option with its value, or a list of several, as a line of TOML that
    `--config` reads; `known` are the command's options, which a family's own need not
    be among.

    A number, and `true` of a switch, may be given as text, as on a command line.
    """
    flag = known.get(option)
    if isinstance(value, list | tuple):
        return f"{option} = [{', '.join(_literal(one, flag) for one in value)}]"
    text = _literal(value, flag)
    return f"{option} = [{text}]" if flag and flag.many else f"{option} = {text}"


def _literal(value: Any, flag: Flag | None) -> str:
    text = str(value)
    is_switch = isinstance(value, bool) or (flag is not None and flag.kind is bool)
    if is_switch and text.lower() in ("true", "false"):
        return text.lower()
    is_text = flag is not None and flag.kind not in (int, float)
    if not is_text and NUMBER.fullmatch(text):
        return text
    # A string of JSON is one of TOML, but for one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_resolved(
    path: Path, config: ModelChoice, versions: Mapping[str, str]
) -> None:
    """Write a configuration and the versions of the libraries as JSON, without the
    options of one start, which would resume or delete a run. Raises SystemFault.
    """
    written = {**as_flags(config), "versions": versions}
    for name in options_affecting("start"):
        written.pop(name, None)
    # Here alone: what it has set is compared and recorded elsewhere, not by whom.
    written |= {
        one.name: getattr(config, one.name) for one in changed(config, "origin")
    }
    text = json.dumps(written, ensure_ascii=False, indent=1, sort_keys=True)
    # A lone surrogate stands for a byte of a path that is not UTF-8; JSON can escape it.
    write_file(path, (text + "\n").encode(errors="backslashreplace"))


def read_resolved(output: Path) -> dict[str, Any]:
    """Read the configuration that a run wrote; raises StateError if there is none."""
    try:
        recorded: dict[str, Any] = json.loads((output / CONFIG).read_bytes())
        _ = recorded["model"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = (
            f"no configuration in {CONFIG}" if output.exists() else "it does not exist"
        )
        what = f"is not the output folder of a run: {why}; name its --output_path"
        raise StateError(output, what) from error
    return recorded


def with_run_options(config: GenerateConfig) -> GenerateConfig:
    """Fill in what the run of --run used, where the configuration does not say it.

    Raises StateError for a folder without a run, UsageError for another family, and for
    an option of a plugin that is not installed without which the image is another one.
    """
    run = config.run
    if run is None:
        return config
    recorded = read_resolved(run)
    if not config.model:
        config = replace(config, model=recorded["model"])
    if recorded["model"] != config.model:
        what = f"is {config.model}, but {run} trained {recorded['model']}"
        raise UsageError("--model", what)
    names = ["mixed_precision"] if config.mixed_precision is None else []
    if not any(getattr(config, name) for name in (*MODEL_FILES, "toy")):
        names += [*MODEL_FILES, "toy", "hub"]
    # An older version may have written fewer options.
    values = {name: recorded[name] for name in names if name in recorded}
    for record in records(config.disabled_plugins):
        if hasattr(record.options, "of_run"):
            values |= config.of(record.options).of_run(recorded)
    known = {*flags_by_name(TrainConfig), "p", "recipe", "versions"}
    options = {}
    for name, value in recorded.items():
        if name in known or value in (None, False):
            continue
        advice = how_to_have("options", name)
        if not advice:
            options[name] = str(value)
        elif not is_default_of_absent(name, value) and how_to_have("generate", name):
            where = f"{run / CONFIG}:{name}"
            raise UsageError(where, "no such option is installed", advice)
    values["family_options"] = {**options, **config.family_options}
    return replace(config, **values)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redacted(str(value))
