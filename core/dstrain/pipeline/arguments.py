"""Check the values that a script gives for inputs."""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dstrain.console import number_of
from dstrain.data.images import convert
from dstrain.errors import UsageError
from dstrain.graph import Column, Frames, Input, Measured

SEEDS = (-(2**63), 2**64 - 1)
"""The least and the greatest seed that torch takes."""
NOT_GIVEN: Any = object()
"""Stands for an argument that is left out, where None means something else."""
ONE_EACH = ("prompt", "negative_prompt", "seed")
"""Arguments of which several prompts may have one each."""


def is_list(value: object) -> bool:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def one_by_one(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each of several prompts; raises UsageError for lists that
    are not as long as that of the prompts.
    """
    count = len(given["prompt"])
    lists = {name: given[name] for name in ONE_EACH if is_list(given.get(name))}
    for name, values in lists.items():
        if len(values) != count:
            entries = number_of(len(values), "entry", "entries")
            what = f"has {entries} for {number_of(count, 'prompt')}"
            raise UsageError(name, what, "give one for all, or one for each")
    return [
        {**given, **{name: values[i] for name, values in lists.items()}}
        for i in range(count)
    ]


def checked(
    inputs: Mapping[str, Input], given: Mapping[str, Any], sized: Collection[str] = ()
) -> dict[str, Any]:
    """Return values of inputs and of the sampler's options, images in the colour mode that
    their inputs have.

    Raises UsageError for what is no image or video where one is expected, and for numbers
    that nothing else would refuse. Names that are no input are left alone, and so is None.

    Args:
        inputs: The inputs of the variant.
        given: The values.
        sized: Images whose sides must be what the variant takes, since nothing resizes them.
    """
    values = dict(given)
    for name, value in given.items():
        source = inputs.get(name)
        if name in ("seed", "num_inference_steps") and isinstance(value, bool | float):
            raise UsageError(name, f"expected an integer, got {value}")
        if isinstance(value, float) and not isfinite(value):
            raise UsageError(name, f"expected a finite number, got {value}")
        if source is None or value is None:
            continue
        if source.kind == "video":
            _check_frames(name, value)
        if isinstance(source, Column) and source.kind in ("image", "images"):
            several = source.kind == "images"
            images = value if is_list(value) else [value]
            others = [one for one in images if not isinstance(one, Image.Image)]
            if others or is_list(value) != several:
                what = "a list of images" if several else "an image"
                got = type((*others, value)[0]).__name__
                raise UsageError(name, f"expected {what} (PIL.Image.Image), got {got}")
            try:
                values[name] = _in_mode(value, source.mode)
            except ValueError as error:
                raise UsageError(name, str(error)) from error
        if name in sized and isinstance(source, Column):
            _check_sides(name, values[name], source.multiple)
    steps = values.get("num_inference_steps")
    if steps is not None and steps < 1:
        raise UsageError("num_inference_steps", f"expected 1 or more, got {steps}")
    seed = values.get("seed")
    if seed is not None and not SEEDS[0] <= seed <= SEEDS[1]:
        what = f"expected {SEEDS[0]} to {SEEDS[1]}, got {seed}"
        raise UsageError("seed", what)
    return values


def _check_frames(name: str, value: Any) -> None:
    """Raise UsageError for frames that are not as `Frames` says."""
    pixels = value.pixels if isinstance(value, Frames) else value
    if isinstance(pixels, Tensor):
        is_whole = pixels.dim() == 4 and pixels.shape[-1] == 3 and pixels.numel() > 0
        if is_whole and pixels.dtype == torch.uint8 and pixels is not value:
            return
        pixels = f"{str(pixels.dtype).removeprefix('torch.')} {list(pixels.shape)}"
    what = "expected Frames of uint8 (frames, height, width, 3)"
    raise UsageError(name, f"{what}, got {pixels}")


def check_measured(inputs: Mapping[str, Input], values: Mapping[str, Any]) -> None:
    """Refuse a size that is given and is not that of the image or video it is measured on."""
    for name, source in inputs.items():
        if not isinstance(source, Measured) or name not in values:
            continue
        size = sizes_of(values.get(source.of)).get(source.axis)
        if size is not None and values[name] != size:
            what = f"is {values[name]}, but {source.of} has {size}"
            raise UsageError(name, what)


def with_sizes(
    inputs: Mapping[str, Input], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values with the sizes that are measured on them and were not given."""
    found = dict(values)
    for name, source in inputs.items():
        if isinstance(source, Measured) and name not in found:
            sizes = sizes_of(values.get(source.of))
            if source.axis in sizes:
                found[name] = sizes[source.axis]
    return found


def _in_mode(value: Any, mode: str) -> Any:
    """Return images as a dataset's would be loaded."""
    if isinstance(value, Image.Image):
        return value if value.mode == mode else convert(value, mode)
    return [_in_mode(one, mode) for one in value]


def _check_sides(name: str, value: Any, multiple: int) -> None:
    sizes = sizes_of(value)
    if not sizes or not multiple:
        return
    height, width = sizes["height"], sizes["width"]
    if height % multiple or width % multiple:
        near = [max(1, side // multiple) * multiple for side in (width, height)]
        what = f"is {width} x {height} (width x height); both must be multiples of {multiple}"
        raise UsageError(name, what, f"crop or resize it to {near[0]} x {near[1]}")


def sizes_of(value: Any) -> dict[str, int]:
    """Return the sizes of an image or a video by what they are; {} for anything else."""
    if isinstance(value, Image.Image):
        return {"height": value.height, "width": value.width, "frames": 1}
    if isinstance(value, Frames):
        count, height, width, _ = value.pixels.shape
        return {"height": height, "width": width, "frames": count}
    return {}
