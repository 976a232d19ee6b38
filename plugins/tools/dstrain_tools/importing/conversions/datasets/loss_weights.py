"""Conversions of how much datasets, and parts of images, count in the loss."""

from pathlib import Path
from typing import Any

from dstrain_tools.importing.context import Context, as_number, truth
from dstrain_tools.importing.entries import Result


def regularization(option: str, value: Any, context: Context) -> Result:
    """Weigh the loss of images that keep what the model knew."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: as_number(context.value("prior_loss_weight", 1.0))})


def prior_weight(option: str, value: Any, context: Context) -> Result:
    """Leave the weight to the dataset that it is for."""
    return Result(note="is the loss_weight of datasets for regularization")


def class_folders(option: str, value: Any, context: Context) -> Result:
    """Name a folder of images, with the weight of its loss."""
    if not value:
        return Result(note="is empty")
    found: dict[str, Any] = {option: value}
    if context.key == "reg_data_dir":
        found["loss_weight"] = as_number(context.value("prior_loss_weight", 1.0))
    note = ""
    if not Path(str(value)).is_dir():
        note = "is not here: folders such as 10_dog in it are one dataset, drawn once"
    return Result(found, note)


def mask_weight(option: str, value: Any, context: Context) -> Result:
    """Weigh what a mask leaves out, where there are masks."""
    if not context.is_on("alpha_mask"):
        return Result(note="has an effect only with masks")
    return Result({option: value})


def weight_of_network(option: str, value: Any, context: Context) -> Result:
    """Do not weigh the LoRA by dataset."""
    if as_number(value) == 1:
        return Result(note="is the default")
    return Result(
        lost="the loss of a dataset has a weight, loss_weight; its LoRA has none"
    )
