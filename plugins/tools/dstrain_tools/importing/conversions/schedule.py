"""Conversions of the learning rate over time, and of how long a run is."""

from typing import Any

from dstrain_tools.importing.context import Context, as_number, as_whole_number
from dstrain_tools.importing.conversions.encoders import rates
from dstrain_tools.importing.conversions.plain import as_it_is
from dstrain_tools.importing.entries import Result

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "polynomial",
    "cosine_with_restarts",
    "rex",
)
OF_AI_TOOLKIT = 1000
"""Steps of the warm-up of its constant_with_warmup, where none are given."""


def rate(option: str, value: Any, context: Context) -> Result:
    """Give the learning rate, unless that of the denoiser is given too."""
    if context.trained_encoders:
        return Result({option: rates(context)})
    if context.value("unet_lr") or context.value("train.unet_lr"):
        return Result(note="unet_lr takes precedence")
    return as_it_is(option, value, context)


def denoiser_rate(option: str, value: Any, context: Context) -> Result:
    """Give the learning rate of the denoiser, which is what is trained."""
    if context.trained_encoders:
        return Result({option: rates(context)})
    return Result({option: value}) if value else Result(note="is empty")


def scheduler(option: str, value: Any, context: Context) -> Result:
    """Name the schedule of the learning rate."""
    name = str(value).lower()
    if name == "cosine_with_min_lr":
        return Result({option: "cosine"}, lost="the learning rate ends at 0 here")
    if name == "constant_with_warmup" and not _warms_up(context):
        if context.source.tool == "ai-toolkit":
            return Result({option: name, "lr_warmup_steps": OF_AI_TOOLKIT})
        return Result({option: "constant"}, "there are no warm-up steps")
    if name not in SCHEDULES:
        return Result(lost=f"{name} is none of --lr_scheduler: {', '.join(SCHEDULES)}")
    return Result({option: name})


def _warms_up(context: Context) -> bool:
    keys = ("lr_warmup_steps", "train.lr_scheduler_params.num_warmup_steps")
    return any(as_number(context.value(key) or 0) for key in keys)


def warmup(option: str, value: Any, context: Context) -> Result:
    """Count the steps of a warm-up, which may be a share of all."""
    number = as_number(value)
    if not number:
        return Result(note="is the default")
    if _schedule(context) == "constant":
        return Result(
            note="the schedule is constant, which has no warm-up there either"
        )
    if number >= 1:
        return Result({option: int(number)})
    total = context.value("max_train_steps")
    if total is None or context.value("max_train_epochs") is not None:
        return Result(lost="is a share of all steps; --lr_warmup_steps N counts them")
    steps = max(1, round(number * as_whole_number(total)))
    return Result({option: steps}, f"{value} of {total} steps")


def cycles(option: str, value: Any, context: Context) -> Result:
    """Count the cosines, where there are several."""
    if _schedule(context) == "cosine_with_restarts":
        return Result({option: value})
    return Result(note="acts with lr_scheduler cosine_with_restarts alone")


def power(option: str, value: Any, context: Context) -> Result:
    """Give the exponent, where there is one."""
    if _schedule(context) == "polynomial":
        return Result({option: value})
    return Result(note="acts with lr_scheduler polynomial alone")


def steps(option: str, value: Any, context: Context) -> Result:
    """Count the steps, unless epochs do."""
    if context.value("max_train_epochs") not in (None, ""):
        return Result(note="max_train_epochs takes precedence")
    return as_it_is(option, value, context)


def _schedule(context: Context) -> str:
    for key in ("lr_scheduler", "train.lr_scheduler"):
        name = str(context.value(key, "")).lower()
        if name:
            return name
    return "constant"
