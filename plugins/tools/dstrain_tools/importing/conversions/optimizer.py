"""Conversions of the optimizer and its arguments."""

from types import MappingProxyType
from typing import Any

from dstrain_tools.importing.context import Context, as_list, truth
from dstrain_tools.importing.entries import Result

OPTIMIZERS = MappingProxyType(
    {
        "adamw": "adamw",
        "adamw8bit": "adamw8bit",
        "adamw8": "adamw8bit",
        "pagedadamw8bit": "paged_adamw8bit",
        "lion": "lion",
        "lion8bit": "lion8bit",
        "pagedlion8bit": "paged_lion8bit",
        "ademamix8bit": "ademamix8bit",
        "adafactor": "adafactor",
        "prodigy": "prodigy",
        "prodigyopt.prodigy": "prodigy",
        "came": "came",
        "adamwschedulefree": "schedulefree",
        "schedulefree.adamwschedulefree": "schedulefree",
        "bitsandbytes.optim.adamw8bit": "adamw8bit",
        "bitsandbytes.optim.pagedadamw8bit": "paged_adamw8bit",
    }
)


def optimizer(option: str, value: Any, context: Context) -> Result:
    """Name the optimizer as dstrain does."""
    name = str(value)
    if not name:
        return Result(note="is the default, adamw")
    if name.lower() in OPTIMIZERS:
        return Result({option: OPTIMIZERS[name.lower()]})
    if "." in name:
        return Result({option: name})
    return Result(
        lost=f"{name} has no name here: --optimizer takes the dotted path of its class"
    )


def optimizer_8bit(option: str, value: Any, context: Context) -> Result:
    """Switch on the one of bitsandbytes."""
    return Result({option: "adamw8bit"}) if truth(value) else Result(note="is off")


def optimizer_lion(option: str, value: Any, context: Context) -> Result:
    """Switch on Lion."""
    return Result({option: "lion"}) if truth(value) else Result(note="is off")


def words(option: str, value: Any, context: Context) -> Result:
    """Carry NAME=VALUE words over; the weight decay is an option of its own."""
    found: dict[str, Any] = {}
    rest = []
    for text in as_list(value):
        for word in str(text).split():
            name, equals, amount = word.partition("=")
            if name == "weight_decay" and equals:
                found["weight_decay"] = amount
            else:
                rest.append(word)
    if rest:
        found[option] = rest
    return Result(found) if found else Result(note="is empty")


def argument(option: str, value: Any, context: Context) -> Result:
    """Carry an argument of the optimizer over, by the last part of its key."""
    name = context.key.rpartition(".")[2]
    amount = ",".join(str(one) for one in as_list(value))
    return Result({option: [f"{name}={amount}"]})
