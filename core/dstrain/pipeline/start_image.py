"""Fit the image or video that inference starts from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from dstrain.data.images import Resolution, Size, convert, cover, fit
from dstrain.errors import UsageError
from dstrain.graph import Column, Frames, Measured, PipelineSpec
from dstrain.models.functional import check_sides
from dstrain.pipeline.arguments import sizes_of
from dstrain.pipeline.loss_masks import LATENTS

STRENGTH = "denoising_strength"
MAX_PIXELS = 1024 * 1024
"""Pixels to which a larger image or video is scaled down where no size is given: the
default of --max_pixels in training."""


def start_input(spec: PipelineSpec) -> str:
    """Return the input from which a variant can start: what it learns to generate; ''
    where that is not one image or one video.
    """
    for source in spec.inputs.values():
        if isinstance(source, Measured) and source.axis == "height":
            column = spec.inputs[source.of]
            is_one = isinstance(column, Column) and column.kind in ("image", "video")
            return source.of if is_one and LATENTS in spec.makers else ""
    return ""


def check_start(spec: PipelineSpec, inputs: Mapping[str, Any]) -> None:
    """Raise UsageError unless the variant has an image or video to start from."""
    name = start_input(spec)
    if not name:
        what = f"variant {spec.variant} does not start from one image or video"
        raise UsageError(STRENGTH, what)
    if name not in inputs:
        what = f"needs input {name!r}, the {spec.inputs[name].kind} to start from, which is absent"
        advice = f"on the command line, --input {name}=FILE gives it"
        raise UsageError(STRENGTH, what, advice)


def fitted_start(
    spec: PipelineSpec, inputs: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs with the image or video to start from in the size that is
    generated; where no size is given, that is its own, as a dataset would have it.

    Raises UsageError for what is too small or too short.

    inputs: All inputs, with the variant's defaults; `given` are those of the call.
    """
    name = start_input(spec)
    column = spec.inputs[name]
    assert isinstance(column, Column)  # `start_input` says so
    measured = ((k, one) for k, one in spec.inputs.items() if isinstance(one, Measured))
    sizes = {one.axis: side for side, one in measured if one.of == name}
    if sizes["height"] in spec.makers[LATENTS].inputs:
        return dict(inputs)  # its unit crops it itself
    start = inputs[name]
    own_sizes = sizes_of(start)
    own = own_sizes["height"], own_sizes["width"]
    sides = (sizes["height"], sizes["width"])
    height, width = (given.get(side) for side in sides)
    if (height is None) != (width is None):
        missing = sides[0] if height is None else sides[1]
        what = f"{missing} is absent; give both or neither"
        raise UsageError(" and ".join(sides), what)
    if height is not None and width is not None and column.multiple:
        check_sides(height, width, column.multiple)
    try:
        size = fit(own, Resolution(height, width, MAX_PIXELS), column.multiple)
    except ValueError:
        what = f"{own[0]} x {own[1]} (height x width) is too small or too elongated"
        advice = f"give {' and '.join(sides)}, multiples of {column.multiple}"
        raise UsageError(name, what, advice) from None
    fitted = dict(zip(sides, size, strict=True))
    if isinstance(start, Frames):
        frames = sizes["frames"]
        number = _number_of_frames(name, start, column, given.get(frames))
        return {**inputs, **fitted, frames: number, name: _cut(start, number, size)}
    return {**inputs, **fitted, name: cover(convert(start, column.mode), size)}


def _number_of_frames(
    name: str, video: Frames, column: Column, wanted: int | None
) -> int:
    """Return how many frames are generated: as many as are wanted, else as the video has
    and the model can make.
    """
    own = len(video.pixels)
    if wanted is None:
        step = column.frame_multiple
        return (own - 1) // step * step + 1 if step else own
    if own < wanted:
        what = f"frames: {own}, but the video to generate has {wanted}"
        raise UsageError(name, what)
    return wanted


def _cut(video: Frames, number: int, size: Size) -> Frames:
    """Return the first frames of a video, scaled to cover this size and cropped."""
    pixels = video.pixels[:number]
    if tuple(pixels.shape[1:3]) != size:
        images = (cover(Image.fromarray(frame.numpy()), size) for frame in pixels)
        pixels = torch.from_numpy(np.stack([np.array(image) for image in images]))
    return Frames(pixels, video.fps)
