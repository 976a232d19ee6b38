"""Conversions of how timesteps are drawn, and of the loss at each."""

from types import MappingProxyType
from typing import Any

from dstrain_tools.importing.context import Context, as_number, truth
from dstrain_tools.importing.entries import Result

SAMPLINGS = MappingProxyType(
    {
        "sigmoid": "sigmoid",
        "uniform": "uniform",
        "linear": "uniform",
        "shift": "logit_normal",
        "flux_shift": "logit_normal",
        "flux2_shift": "logit_normal",
        "qwen_shift": "logit_normal",
        "weighted": "uniform",
    }
)
"""How timesteps are drawn there -> the name of the same, or the nearest, here."""
OF_SIGMA = MappingProxyType(
    {
        "none": "shifted",
        "uniform": "shifted",
        "logit_normal": "logit_normal",
        "mode": "mode",
    }
)
"""weighting_scheme -> distribution of `timestep_sampling sigma`."""
SHIFTED = ("sigma", "shift")
"""Those that use discrete_flow_shift."""
BY_SIZE = ("flux_shift", "flux2_shift", "qwen_shift")
"""Those that shift a sigmoid by the size of the image."""
OF_SIGMOID = ("sigmoid", "shift", *BY_SIZE)
"""Those that use sigmoid_scale."""


def timesteps(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps, or the nearest."""
    name = str(value)
    found = {option: SAMPLINGS.get(name, "shifted")}
    if name == "sigma":
        scheme = str(context.value("weighting_scheme", "none"))
        found = {option: OF_SIGMA.get(scheme, "shifted")}
    elif name not in SAMPLINGS:
        return Result(
            found, f"{name} has no counterpart; the model's own shift is near"
        )
    if name not in SHIFTED:
        near = "the shift is the model's own, and not that of each image's size"
        return Result(found, near if name in BY_SIZE else "")
    shift = context.value("discrete_flow_shift", context.table.shift)
    return Result({**found, "timestep_shift": as_number(shift)})


def flow_shift(option: str, value: Any, context: Context) -> Result:
    """Take the shift, where the distribution of timesteps uses it."""
    if str(context.value("timestep_sampling", "sigma")) in SHIFTED:
        return Result({option: as_number(value)})
    return Result(note="acts only with timestep_sampling shift or sigma")


def sigmoid_scale(option: str, value: Any, context: Context) -> Result:
    """Take the standard deviation of what a sigmoid is taken of."""
    if str(context.value("timestep_sampling")) in OF_SIGMOID:
        return Result({option: as_number(value)})
    return Result(note="acts only where a sigmoid is drawn")


def logit_number(option: str, value: Any, context: Context) -> Result:
    """Take a number of the normal of weighting_scheme logit_normal; there a larger one
    has less noise.
    """
    scheme = str(context.value("weighting_scheme"))
    drawn = str(context.value("timestep_sampling", "sigma"))
    if (drawn, scheme) != ("sigma", "logit_normal"):
        return Result(note="acts only with weighting_scheme logit_normal")
    number = as_number(value)
    return Result({option: 0.0 - number if option == "timestep_mean" else number})


def timestep_type(option: str, value: Any, context: Context) -> Result:
    """Name the distribution of timesteps of ai-toolkit."""
    if value == "weighted":
        found = {option: "uniform", "loss_weighting": "bsmntw"}
        return Result(found, "the weights are those of --loss_weighting bsmntw")
    if value in ("shift", "flux_shift", "lumina2_shift"):
        return Result({option: "shifted"}, "the shift is the model's own")
    return timesteps(option, value, context)


def weighting(option: str, value: Any, context: Context) -> Result:
    """Name the weights of the loss by timestep."""
    if str(value) in ("sigma_sqrt", "cosmap"):
        return Result(
            {option: "none"},
            lost=f"{value} is none of --loss_weighting: none, bsmntw, min_snr",
        )
    return Result({option: "none"})


def v_prediction(option: str, value: Any, context: Context) -> Result:
    """Train the variant that predicts v, whose noise leaves nothing of the image."""
    if not truth(value):
        return Result(note="is off")
    if context.is_on("zero_terminal_snr"):
        return Result({option: "v"})
    return Result(
        {option: "v"}, "the last timestep is noise alone, as with zero_terminal_snr"
    )


def terminal_snr(option: str, value: Any, context: Context) -> Result:
    """Leave it to the variant whether noise leaves something of the image."""
    if not truth(value):
        return Result(note="is off")
    if context.is_on("v_parameterization"):
        return Result(note="variant v has it")
    return Result(lost="only --variant v has it, which predicts v")


def loss_kind(option: str, value: Any, context: Context) -> Result:
    """Name how errors count."""
    name = str(value)
    if name in ("mse", "l2"):
        return Result(note="is the loss here")
    if name in ("mae", "l1"):
        return Result({option: "mae"})
    if name != "huber":
        return Result(lost=f"{name} is none of --loss: mse, huber, mae")
    delta = as_number(context.value("huber_c", 0.1))
    schedule = str(context.value("huber_schedule", "snr"))
    return Result({option: name, "huber_delta": delta, "huber_schedule": schedule})


def of_huber(option: str, value: Any, context: Context) -> Result:
    """Take a setting of the pseudo-Huber loss."""
    if context.value("loss_type") != "huber":
        return Result(note="acts only with loss_type huber")
    return Result({option: value})


def snr_gamma(option: str, value: Any, context: Context) -> Result:
    """Weigh by the signal-to-noise ratio, where nothing else weighs."""
    gamma = as_number(value or 0)
    if gamma <= 0:
        return Result(note="is off")
    if context.value("train.timestep_type") == "weighted":
        return Result(
            lost="--loss_weighting is one of none, bsmntw, min_snr: bsmntw of timestep_type"
        )
    return Result({option: gamma, "loss_weighting": "min_snr"})


def unless_zero(option: str, value: Any, context: Context) -> Result:
    """Take a number that is not 0."""
    number = as_number(value)
    return Result({option: number}) if number else Result(note="0 changes nothing")
