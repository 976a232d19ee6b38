"""Conversions of the sizes that images and videos are trained at."""

import math
from typing import Any

from dstrain_tools.importing.context import Context, as_list, as_whole_number, truth
from dstrain_tools.importing.entries import Result

CROPS = 4
"""Places at which images are cropped, in place of any."""


def width_and_height(option: str, value: Any, context: Context) -> Result:
    """Give the area of buckets, or one size."""
    text = str(value).split(",") if isinstance(value, str) else as_list(value)
    sides = [as_whole_number(one) for one in text]
    if not sides:
        raise ValueError("no size is given")
    width, height = sides[0], sides[-1]
    if not _in_buckets(context):
        return Result({"height": height, "width": width})
    side = round(math.sqrt(width * height))
    note = "" if width == height else f"the area of {width} x {height} pixels"
    return Result({option: str(side)}, note)


def with_resolution(option: str, value: Any, context: Context) -> Result:
    """Leave it to the size whether there are buckets."""
    if truth(value):
        return Result(note="the option resolution makes buckets")
    return Result(note="the options height and width make one size")


def sides(option: str, value: Any, context: Context) -> Result:
    """Give the sides of the squares whose areas buckets have."""
    return Result({option: ",".join(str(one) for one in as_list(value))})


def in_buckets(option: str, value: Any, context: Context) -> Result:
    """Carry a number of buckets over, where there are any."""
    if not _in_buckets(context):
        return Result(note="has an effect only with buckets")
    return Result({option: value})


def not_in_buckets(option: str, value: Any, context: Context) -> Result:
    """Scale small images up unless that is switched off."""
    if not _in_buckets(context) or truth(value):
        return Result(note="small images are not scaled up by default")
    return Result({option: True})


def random_crops(option: str, value: Any, context: Context) -> Result:
    """Crop at several places, in place of any."""
    if not truth(value):
        return Result(note="is off")
    return Result(
        {option: CROPS}, f"{CROPS} places, evenly spaced, whose latents can be cached"
    )


def _in_buckets(context: Context) -> bool:
    """Return whether images of several sizes are sorted into buckets."""
    if context.source.tool == "ai-toolkit":
        return True
    return context.is_on("enable_bucket")
