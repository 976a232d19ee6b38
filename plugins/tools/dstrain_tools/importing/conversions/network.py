"""Conversions of the adapter that is trained."""

from typing import Any

from dstrain_tools.importing.context import Context, as_list, as_number, as_whole_number
from dstrain_tools.importing.entries import Result

WHOLE = 10000
"""A rank at which the second matrix of a LoKr is not a product of two."""


def adapter(context: Context) -> str:
    """Return the kind of adapter: lora, dora, lokr, or other."""
    name = str(context.value("network.type") or "").lower()
    if name:
        return name if name in ("lora", "dora", "lokr") else "other"
    module = str(context.value("network_module", ""))
    arguments = " ".join(str(one) for one in as_list(context.value("network_args", "")))
    if "lokr" in module or "algo=lokr" in arguments:
        return "lokr"
    if "algo=dora" in arguments or "dora_wd=True" in arguments:
        return "dora"
    is_other = "loha" in module or "algo=" in arguments.replace("algo=lora", "")
    return "other" if is_other else "lora"


def _is_whole(context: Context) -> bool:
    """Return whether the second matrix of a LoKr is not a product of two."""
    arguments = " ".join(str(one) for one in as_list(context.value("network_args", "")))
    is_asked = context.is_on("network.lokr_full_rank") or (
        "full_matrix=true" in arguments.lower()
    )
    return is_asked and adapter(context) == "lokr"


def full_rank(option: str, value: Any, context: Context) -> Result:
    """Make the second matrix of a LoKr a whole one, not a product of two."""
    if not _is_whole(context):
        return Result(note="affects only a LoKr")
    note = "with a rank this large, the second matrix is not a product of two"
    return Result({option: WHOLE, "lora_alpha": WHOLE}, note)


def network_module(option: str, value: Any, context: Context) -> Result:
    """Tell the kind of adapter by the module that makes it."""
    kind = adapter(context)
    if kind == "other":
        return Result(lost=f"{value} is none of --lora_type: lora, dora, lokr")
    if kind == "lora":
        return Result(note="a LoRA is what is trained by default")
    return Result({option: kind})


def network_type(option: str, value: Any, context: Context) -> Result:
    """Name the kind of adapter."""
    name = str(value).lower()
    if name == "lora":
        return Result(note="a LoRA is what is trained by default")
    if name in ("dora", "lokr"):
        return Result({option: name})
    return Result(lost=f"{name} is none of --lora_type: lora, dora, lokr")


def network_args(option: str, value: Any, context: Context) -> Result:
    """Carry over what has a counterpart among the arguments of the module."""
    found: dict[str, Any] = {}
    lost = []
    for text in as_list(value):
        for word in str(text).split():
            name, _, amount = word.partition("=")
            if name == "loraplus_lr_ratio":
                found["loraplus_lr_ratio"] = amount
            elif name == "factor" and adapter(context) == "lokr":
                found.update(factor("lokr_factor", amount, context).options)
            elif name == "full_matrix" and adapter(context) == "lokr":
                if _is_whole(context):
                    found |= {"lora_rank": WHOLE, "lora_alpha": WHOLE}
            elif name in ("algo", "dora_wd") and adapter(context) != "other":
                pass  # network_module says it
            else:
                lost.append(name)
    if lost:
        names = ", ".join(lost)
        return Result(
            found, lost=f"{names}: layers are chosen by --lora_target_modules"
        )
    return Result(found, "" if found else "network_module says it")


def of_lora(option: str, value: Any, context: Context) -> Result:
    """Carry a number of a LoRA over, where one is trained."""
    if value is None or not context.trains_lora:
        return Result(note="has an effect only if a LoRA is trained")
    if option != "lora_dropout" and _is_whole(context):
        return Result(
            note="affects only a LoKr whose second matrix is a product of two"
        )
    if option == "lora_dropout" and not as_number(value):
        return Result(note="is 0: none")
    return Result({option: value})


def factor(option: str, value: Any, context: Context) -> Result:
    """Give the factor of a LoKr, where -1 is the default."""
    if as_whole_number(value) < 1 or adapter(context) != "lokr":
        return Result(note="is the default")
    return Result({option: as_whole_number(value)})
