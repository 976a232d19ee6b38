"""Write generated images and videos."""

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from dstrain.data.videos import Pixels
from dstrain.errors import UsageError
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.values import Frames
from dstrain.storage.files import replacing


def write_video(frames: "Frames", path: Path) -> None:
    """Write frames as .mp4 (H.264, yuv420p: sides must be even) or .gif (times rounded
    to hundredths of a second).

    Raises UsageError for another ending, odd sides, no frames, or frames per second
    that are not above 0.
    """
    pixels: Pixels = frames.pixels.numpy()
    check_video_name(path)
    if not len(pixels) or not frames.fps > 0:
        raise UsageError(
            str(path),
            f"cannot be written: {len(pixels)} frames at {frames.fps} frames per second",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".gif":
        ends = [round(100 * (number + 1) / frames.fps) for number in range(len(pixels))]
        shown = [
            10 * max(1, after - before)
            for before, after in zip([0, *ends], ends, strict=False)
        ]
        first, *others = [Image.fromarray(image) for image in pixels]
        first.save(path, save_all=True, append_images=others, duration=shown, loop=0)
        return
    height, width = pixels.shape[1:3]
    if height % 2 or width % 2:
        raise UsageError(
            str(path),
            f"{height} x {width} (height x width): the sides of an mp4's frames are even",
        )
    from imageio.v3 import imwrite

    imwrite(
        path,
        pixels,
        plugin="pyav",
        codec="libx264",
        fps=frames.fps,
        out_pixel_format="yuv420p",
    )


def check_video_name(path: Path) -> None:
    """Raise UsageError for a file name whose ending is no kind of video that is
    written.
    """
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise UsageError(
            str(path),
            f"{path.suffix or 'no ending'} is no kind of video that is written; use .mp4",
        )


def check_output(path: Path, spec: PipelineSpec) -> None:
    """Refuse, before anything is loaded, a folder, and a file name whose ending is not
    of what the variant makes.
    """
    if path.is_dir():
        raise UsageError("--output", f"{path} is a folder; give the name of a file")
    if spec.makes_video:
        check_video_name(path)
        return
    try:
        kind = Image.registered_extensions()[path.suffix.lower()]
        Image.new("RGB", (8, 8)).save(
            BytesIO(), kind
        )  # some formats can be read and not written, or not in colour
    except (KeyError, OSError, ValueError) as error:
        what = f"{path}: {path.suffix or 'no ending'} is no picture format that can be written; use .png"
        raise UsageError("--output", what) from error


def save_image_or_video(made: Any, path: Path) -> None:
    """Write a picture or a video in the format its file name asks for: whole, or not at
    all.

    Raises SystemFault if it cannot be written; what was there before is then untouched.
    """
    try:
        with replacing(path) as building:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(made, Frames):
                write_video(made, building)
            else:
                made.save(building)
    except UsageError as error:
        raise UsageError(str(path), error.what) from error
    except ValueError as error:
        raise UsageError("--output", f"{path}: {error}") from error
