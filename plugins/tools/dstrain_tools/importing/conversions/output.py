"""Conversions of what a run writes: its folder, weights, averages, numbers."""

from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import Context, as_whole_number, single, truth
from dstrain_tools.importing.entries import Result


def output(option: str, value: Any, context: Context) -> Result:
    """Name the folder of the run: that of all runs, and its name."""
    name = context.value("output_name") or context.value("config.name")
    folder = Path(single(value))
    return Result({option: str(folder / single(name)) if name else single(value)})


def output_name(option: str, value: Any, context: Context) -> Result:
    """Name the folder of the run, where no folder of all runs does."""
    parent = context.value("output_dir") or context.value("training_folder")
    if parent:
        return Result({option: str(Path(single(parent)) / single(value))})
    return Result({option: single(value)})


def save_epochs(option: str, value: Any, context: Context) -> Result:
    """Save after every epoch, which is the default."""
    if not value or as_whole_number(value) == 1:
        return Result(note="weights are saved after every epoch by default")
    what = "weights are saved after every epoch, or every --save_steps N steps"
    return Result(lost=f"{what}; how many steps {value} epochs are, --dry_run says")


def average(option: str, value: Any, context: Context) -> Result:
    """Give the decay of an average, where one is kept."""
    if context.is_on("train.ema_config.use_ema"):
        return Result({option: value})
    return Result(note="no average is kept without use_ema")


def use_average(option: str, value: Any, context: Context) -> Result:
    """Keep an average, with the decay of ai-toolkit where none is given."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: context.value("train.ema_config.ema_decay", 0.999)})


def trackers(option: str, value: Any, context: Context) -> Result:
    """Name the trackers."""
    return Result({option: "tensorboard,wandb" if value == "all" else value})


def wandb(option: str, value: Any, context: Context) -> Result:
    """Switch on the tracker."""
    return Result({option: "wandb"}) if truth(value) else Result(note="is off")


def project(option: str, value: Any, context: Context) -> Result:
    """Name the project, where there is a tracker with projects."""
    logs = str(context.value("log_with", "")) in ("wandb", "all")
    if logs or context.is_on("logging.use_wandb"):
        return Result({option: value})
    return Result(note="acts with Weights & Biases alone")
