"""Conversions of how timesteps are drawn, and of the loss at each."""

from types import MappingProxyType
from typing import Any

from dstrain_tools.importing.context import Context, as_number
from dstrain_tools.importing.entries import Result

SAMPLINGS = MappingProxyType(
    {
        "sigmoid": "logit_normal",
        "uniform": "uniform",
        "linear": "uniform",
        "shift": "shifted",
        "flux_shift": "shifted",
        "qwen_shift": "shifted",
        "weighted": "uniform",
    }
)
"""How timesteps are drawn there -> the name of the same, or the nearest, here."""
OF_SIGMA = MappingProxyType(
    {
        "none": "uniform",
        "uniform": "uniform",
        "logit_normal": "logit_normal",
        "mode": "mode",
    }
)
"""weighting_scheme -> distribution of `timestep_sampling sigma`."""


def timesteps(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps, or the nearest."""
    name = str(value)
    if name == "sigma":
        scheme = str(context.value("weighting_scheme", "none"))
        found = OF_SIGMA.get(scheme, "uniform")
        given = context.value("discrete_flow_shift")
        shift = context.table.shift if given is None else as_number(given)
        if found == "uniform" and shift != 1:
            return Result({option: "shifted"}, "the shift is the model's own")
        return Result({option: found})
    if name not in SAMPLINGS:
        return Result(
            {option: "shifted"},
            f"{name} has no counterpart; the model's own shift is near",
        )
    found = SAMPLINGS[name]
    if found == "shifted":
        return Result(
            {option: found},
            f"{name} shifts a sigmoid; here the model's own shift applies to a uniform draw",
        )
    return Result({option: found})


def timestep_type(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps of ai-toolkit."""
    if value == "weighted":
        found = {option: "uniform", "loss_weighting": "bsmntw"}
        return Result(found, "the weights are those of --loss_weighting bsmntw")
    return timesteps(option, value, context)


def weighting(option: str, value: Any, context: Context) -> Result:
    """Name the weights of the loss by timestep."""
    if str(value) in ("sigma_sqrt", "cosmap"):
        return Result(
            {option: "none"}, lost=f"{value} is none of --loss_weighting: bsmntw, none"
        )
    return Result({option: "none"})


def mean_squared(option: str, value: Any, context: Context) -> Result:
    """Take the squared error, which is the loss here."""
    if str(value) in ("mse", "l2"):
        return Result(note="is the loss here")
    return Result(lost=f"{value} is not offered: the loss is that of --task")
