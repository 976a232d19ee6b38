"""Check the values that a script gives for inputs, and say in words what is wrong."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dstrain.console import number_of
from dstrain.data import convert
from dstrain.errors import UsageError
from dstrain.graph import Column, Frames, Input, Measured
from dstrain.graph.inputs import Kind

WORDS: Mapping[Kind, str] = MappingProxyType(
    {
        "text": "text (str)",
        "texts": "a list of texts",
        "integer": "a whole number (int)",
        "number": "a number",
        "image": "an image (PIL.Image.Image)",
        "images": "a list of images (PIL.Image.Image)",
        "video": "a video (Frames)",
        "tensors": "a dictionary of tensors",
    }
)
"""What an input of a kind takes."""
SAMPLER: Mapping[str, Kind] = MappingProxyType(
    {
        "num_inference_steps": "integer",
        "guidance_scale": "number",
        "denoising_strength": "number",
        "seed": "integer",
    }
)
"""Options of the sampler, and what they take."""


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

    Raises UsageError for a value of another type. Names that are no input are left
    alone, and so is None.

    Args:
        inputs: The inputs of the variant.
        given: The values.
        sized: Images whose sides must be what the variant takes, since nothing resizes them.
    """
    values = dict(given)
    for name, value in given.items():
        source = inputs.get(name)
        kind = source.kind if source is not None else SAMPLER.get(name)
        if kind is None or value is None:
            continue
        if not _is(kind, value):
            raise _other(name, kind, value)
        if kind == "number" and not isfinite(value):
            raise UsageError(name, f"expected a finite number, got {value}")
        if kind == "video":
            _check_frames(name, value)
        if isinstance(source, Column) and kind in ("image", "images"):
            try:
                values[name] = _in_mode(value, source.mode)
            except ValueError as error:
                raise UsageError(name, str(error)) from error
        if name in sized and isinstance(source, Column):
            _check_sides(name, values[name], source.multiple)
    if values.get("num_inference_steps") is not None:
        steps = values["num_inference_steps"]
        if steps < 1:
            raise UsageError("num_inference_steps", f"expected 1 or more, got {steps}")
    seed = values.get("seed")
    if seed is not None and not SEEDS[0] <= seed <= SEEDS[1]:
        what = f"expected {SEEDS[0]} to {SEEDS[1]}, got {seed}"
        raise UsageError("seed", what)
    return values


def _check_frames(name: str, value: Frames) -> None:
    """Raise UsageError for frames that are not as `Frames` says."""
    pixels: object = value.pixels
    wanted = "expected frames of uint8 (frames, height, width, 3)"
    if not isinstance(pixels, Tensor):
        raise UsageError(name, f"{wanted}, got {type(pixels).__name__}")
    shape = list(pixels.shape)
    is_whole = pixels.dim() == 4 and shape[-1] == 3 and pixels.numel() > 0
    if not is_whole or pixels.dtype != torch.uint8:
        what = f"{wanted}, got {str(pixels.dtype).removeprefix('torch.')} {shape}"
        is_channels_first = pixels.dim() == 4 and shape[1] == 3 and shape[-1] != 3
        advice = "put the channels last: pixels.permute(0, 2, 3, 1)"
        raise UsageError(name, what, *([advice] if is_channels_first else []))


def check_measured(inputs: Mapping[str, Input], values: Mapping[str, Any]) -> None:
    """Refuse a size that is given and is not that of the image or video it is measured on."""
    for name, source in inputs.items():
        if not isinstance(source, Measured) or name not in values:
            continue
        sizes = _sizes(values.get(source.of))
        if sizes and values[name] != sizes[source.axis]:
            what = f"is {values[name]}, but {source.of} has {sizes[source.axis]}"
            raise UsageError(name, what)


def with_sizes(
    inputs: Mapping[str, Input], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values with the sizes that are measured on them and were not given."""
    found = dict(values)
    for name, source in inputs.items():
        if isinstance(source, Measured) and name not in found:
            sizes = _sizes(values.get(source.of))
            found |= {name: sizes[source.axis]} if sizes else {}
    return found


def _is(kind: Kind, value: Any) -> bool:
    if kind in ("texts", "images"):
        one: Kind = "text" if kind == "texts" else "image"
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(_is(one, item) for item in value)
    if kind in ("integer", "number"):
        wanted = Integral if kind == "integer" else Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    types: dict[str, Any] = {
        "text": str,
        "image": Image.Image,
        "video": Frames,
        "tensors": Mapping,
    }
    return isinstance(value, types[kind])


def _other(name: str, kind: Kind, value: Any) -> UsageError:
    """Return the error of a value of another type, with what makes the right one of it."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_list and kind in ("texts", "images"):
        one: Kind = "text" if kind == "texts" else "image"
        value = next(item for item in value if not _is(one, item))
    shown = f"{type(value).__name__}"
    if isinstance(value, (str, Path, int, float)):
        shown += f" {value if isinstance(value, Path) else repr(value)}"
    elif hasattr(value, "shape"):
        shown += f" of shape {list(value.shape)}"
    advice = ""
    if kind in ("image", "images"):
        if isinstance(value, (str, Path)):
            advice = f"open it: Image.open({str(value)!r})"
        elif hasattr(value, "__array__"):
            advice = (
                "make one of it: Image.fromarray(ARRAY), of uint8 (height, width, 3)"
            )
        elif isinstance(value, Image.Image):
            advice = "put it into a list"
    elif kind in ("integer", "number") and isinstance(value, str):
        advice = "leave out the quotes"
    what = f"expected {WORDS[kind]}, got {shown}"
    return UsageError(name, what, *([advice] if advice else []))


def _in_mode(value: Any, mode: str) -> Any:
    """Return images as a dataset's would be loaded."""
    if isinstance(value, Image.Image):
        return value if value.mode == mode else convert(value, mode)
    return [_in_mode(one, mode) for one in value]


def _check_sides(name: str, value: Any, multiple: int) -> None:
    sizes = _sizes(value)
    if not sizes or not multiple:
        return
    height, width = sizes["height"], sizes["width"]
    if height % multiple or width % multiple:
        near = [max(1, side // multiple) * multiple for side in (width, height)]
        what = f"is {width} x {height} (width x height); both must be multiples of {multiple}"
        raise UsageError(name, what, f"crop or resize it to {near[0]} x {near[1]}")


def _sizes(value: Any) -> dict[str, int]:
    """Return the sizes of an image or a video by what they are; {} for anything else."""
    if isinstance(value, Image.Image):
        return {"height": value.height, "width": value.width, "frames": 1}
    if isinstance(value, Frames):
        count, height, width, _ = value.pixels.shape
        return {"height": height, "width": width, "frames": count}
    return {}
