"""Write a configuration as the command that is typed."""

import os
from dataclasses import replace
from typing import Any

from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import flags
from dstrain.console import shell_command


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
    has_dataset = config.stage != "train" or config.feature_cache is not None
    if config.dataset_base_path is None or not has_dataset:
        return f"to fill it, run the command that filled it, with --task {stage_1}"
    return "to fill it, run: " + command_line(config, task=stage_1, **new_start())


def option_words(name: str, stands_alone: bool, text: str) -> list[str]:
    """Return the words of an option with its value, unless it stands alone."""
    if stands_alone:
        return [f"--{name}"]
    # As one word, where it would be taken for an option.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
