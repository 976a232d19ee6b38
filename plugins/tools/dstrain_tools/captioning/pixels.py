"""Load what the model is shown, by the decoders of datasets."""

from dstrain.data import Resolution, fit, load_image, probe, read_frames, read_size
from PIL import Image

from dstrain_tools.captioning.folder import Task


def load(task: Task, max_pixels: int, num_frames: int) -> list[Image.Image]:
    """Return an image, or frames of a video in order: upright, over white, in RGB.

    Raises UsageError for a file that cannot be decoded.

    Args:
        task: The image or the video.
        max_pixels: Larger ones are scaled down to so many; frames share them.
        num_frames: How many frames of a video; a short one has fewer.
    """
    if not task.is_video:
        resolution = Resolution(None, None, max_pixels)
        size = fit(read_size(task.path), resolution, multiple=1)
        return [load_image(task.path, "RGB", size)]
    video = probe(task.path)
    frames = evenly(video.frames, num_frames)
    resolution = Resolution(None, None, max(1, max_pixels // len(frames)))
    size = fit(video.size, resolution, multiple=1)
    pixels = read_frames(task.path, frames, size)
    return [Image.fromarray(frame) for frame in pixels]


def evenly(total: int, count: int) -> list[int]:
    """Return the middle of each of `count` equal parts of `total` frames."""
    count = min(count, total)
    return [(2 * part + 1) * total // (2 * count) for part in range(count)]
