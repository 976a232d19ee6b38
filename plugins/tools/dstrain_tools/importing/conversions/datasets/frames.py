"""Conversions of which frames of videos are trained on."""

from typing import Any

from dstrain_tools.importing.context import Context, as_list, as_whole_number, truth
from dstrain_tools.importing.entries import Result

VIDEO_FAMILIES = ("wan",)
"""The families whose variants read videos. Their specs say it, too, but they import torch,
which takes longer than the whole import of a configuration.
"""


def reads_videos(context: Context) -> bool:
    """Return whether the model is one of videos."""
    return context.model.family.name in VIDEO_FAMILIES


def frames(option: str, value: Any, context: Context) -> Result:
    """Count the frames of clips."""
    if not _has_videos(context):
        return Result(note="affects only videos")
    numbers = [as_whole_number(one) for one in as_list(value)]
    if len(numbers) == 1:
        return Result({option: numbers[0]})
    note = "a video gives clips of the greatest number that it is long enough for, not of each"
    return Result({option: ",".join(str(one) for one in numbers)}, note)


def most_frames(option: str, value: Any, context: Context) -> Result:
    """Count the frames of whole videos."""
    if context.value("frame_extraction") != "full":
        return Result(note="acts with frame_extraction full alone")
    number = (as_whole_number(value) - 1) // 4 * 4 + 1
    return Result({option: number}, "a shorter video gives all of its frames")


def frame_extraction(option: str, value: Any, context: Context) -> Result:
    """Say which clips a video gives."""
    name = str(value)
    if name == "uniform":
        samples = context.value("frame_sample", 1)
        return Result({option: name, "frame_samples": samples})
    if name in ("head", "chunk"):
        return Result({option: name})
    if name == "full":
        return Result(
            {option: "head"}, "a video gives as many frames as num_frames allows"
        )
    return Result(
        {option: "chunk"},
        f"{name} has no counterpart; clips follow each other without overlap",
    )


def frame_sample(option: str, value: Any, context: Context) -> Result:
    """Count evenly spaced clips."""
    if context.value("frame_extraction") != "uniform":
        return Result(note="acts with frame_extraction uniform alone")
    return Result({option: value})


def source_rate(option: str, value: Any, context: Context) -> Result:
    """Resample videos, or take their frames as they are."""
    if not _has_videos(context):
        return Result(note="affects only videos")
    if value:
        return Result(
            note="the frame rate is read from each file, and resampled to the model's"
        )
    return Result({option: False})


def first_frame(option: str, value: Any, context: Context) -> Result:
    """Read the first frame of videos, where the model can do without."""
    if not truth(value):
        return Result(note="is off")
    if context.model.variant == "ti2v-5b":
        return Result({option: "input_image"})
    return Result(note="variants with a first frame read it by themselves")


def _has_videos(context: Context) -> bool:
    if context.source.tool == "ai-toolkit":
        return reads_videos(context)
    return bool(context.value("video_directory") or context.value("video_jsonl_file"))
