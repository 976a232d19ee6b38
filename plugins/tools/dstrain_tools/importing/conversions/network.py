"""Conversions of the adapter that is trained."""

from typing import Any

from dstrain_tools.importing.context import Context, as_list
from dstrain_tools.importing.entries import Result


def network_module(option: str, value: Any, context: Context) -> Result:
    """Tell the kind of adapter by the module that makes it."""
    kind = _adapter(context)
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
            elif name == "factor" and _adapter(context) == "lokr":
                found.update(factor("lokr_factor", amount, context).options)
            elif name in ("algo", "dora_wd") and _adapter(context) != "other":
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
        return Result(note="acts only where a LoRA is trained")
    if option == "lora_dropout" and not float(value):
        return Result(note="is 0: none")
    return Result({option: value})


def factor(option: str, value: Any, context: Context) -> Result:
    """Give the factor of a LoKr, where -1 is the default."""
    is_lokr = _adapter(context) == "lokr" or context.value("network.type") == "lokr"
    if int(value) < 1 or not is_lokr:
        return Result(note="is the default")
    return Result({option: int(value)})


def _adapter(context: Context) -> str:
    module = str(context.value("network_module", ""))
    arguments = " ".join(str(one) for one in as_list(context.value("network_args", "")))
    if "lokr" in module or "algo=lokr" in arguments:
        return "lokr"
    if "algo=dora" in arguments or "dora_wd=True" in arguments:
        return "dora"
    is_other = "loha" in module or "algo=" in arguments.replace("algo=lora", "")
    return "other" if is_other else "lora"
