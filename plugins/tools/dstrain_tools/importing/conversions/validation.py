"""Conversions of the validation."""

from typing import Any

from dstrain_tools.importing.context import Context, as_number
from dstrain_tools.importing.entries import Result


def share(option: str, value: Any, context: Context) -> Result:
    """Give the share of the validation; 0 is none."""
    return Result({option: value}) if as_number(value) else Result(note="is 0: none")


def of_validation(option: str, value: Any, context: Context) -> Result:
    """Count the steps between validations, where there are any."""
    if as_number(context.value("validation_split", 0) or 0):
        return Result({option: value})
    return Result(note="there is no validation without validation_split")
