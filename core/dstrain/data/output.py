"""Write generated images and videos."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dstrain.data.images import FORMATS
from dstrain.data.packets import check_pyav
from dstrain.errors import UsageError
from dstrain.graph import Frames, PipelineSpec
from dstrain.storage import replacing

TRANSPARENT = frozenset({"AVIF", "PNG", "TIFF", "WEBP"})
"""The formats that keep an alpha channel."""
NOTHING: Mapping[str, str] = MappingProxyType({})


def write_video(frames: Frames, path: Path) -> None:
    """Write frames as .mp4 (H.264, yuv420p), whole or not at all.

    Raises UsageError for another suffix, for no frames, for a rate that is not above 0,
    and for odd sides.
    """
    check_video_name(path)
    count, height, width, _ = frames.pixels.shape
    if not count or not frames.fps > 0:
        what = f"cannot be written: {count} frames at {frames.fps} frames per second"
        raise UsageError(path, what)
    if height % 2 or width % 2:
        what = f"{height} x {width} (height x width): the sides of an mp4 must be even"
        raise UsageError(path, what)
    from imageio.v3 import imwrite

    with replacing(path) as building:
        path.parent.mkdir(parents=True, exist_ok=True)
        imwrite(
            building,
            frames.pixels.numpy(),
            plugin="pyav",
            codec="libx264",
            fps=frames.fps,
            out_pixel_format="yuv420p",
        )


def check_video_name(path: Path) -> None:
    """Raise UsageError for a file that is not called .mp4, or if videos cannot be written
    here.
    """
    if path.suffix.lower() != ".mp4":
        raise UsageError(path, f"ends in {path.suffix!r}; videos are written as .mp4")
    check_pyav(path)


def check_output(path: Path, spec: PipelineSpec) -> None:
    """Raise UsageError for an output that is a folder, or whose suffix is not a format
    of what the variant generates.
    """
    if path.is_dir():
        raise UsageError("--output", f"{path} is a folder; give the name of a file")
    if spec.makes_video:
        check_video_name(path)
        return
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind not in FORMATS:
        what = f"{path} does not end in a supported image format, such as .png"
        raise UsageError("--output", what)
    if spec.makes_layers and kind not in TRANSPARENT:
        what = f"{path}: {kind} has no transparent parts, and layers may have them; use .png"
        raise UsageError("--output", what)


def output_paths(output: Any, path: Path) -> list[Path]:
    """Return the files that an output is written to: of several images, the first one has
    the name given, and the others are numbered after it, 'image-1.png'.
    """
    count = len(output) if isinstance(output, list) else 1
    others = [path.with_stem(f"{path.stem}-{number}") for number in range(1, count)]
    return [path, *others]


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Return images of one height as a single one, from left to right."""
    whole = Image.new("RGBA", (sum(one.width for one in images), images[0].height))
    left = 0
    for one in images:
        whole.paste(one, (left, 0))
        left += one.width
    return whole


def save_image_or_video(
    output: Any, path: Path, about: Mapping[str, str] = NOTHING
) -> None:
    """Write an image, a list of images (see `output_paths`), or Frames, in the format that
    the file name asks for.

    A PNG gets the texts `about` it by their names; other formats have no place for them.
    Each file is written as a whole or not at all. Raises UsageError, or SystemFault if
    one cannot be written; existing files are not modified then.
    """
    if isinstance(output, Frames):
        write_video(output, path)
        return
    if isinstance(output, list):
        for one, place in zip(output, output_paths(output, path), strict=True):
            save_image_or_video(one, place, about)
        return
    with replacing(path) as building:
        path.parent.mkdir(parents=True, exist_ok=True)
        if Image.registered_extensions().get(path.suffix.lower()) == "PNG":
            texts = PngInfo()
            for name, text in about.items():
                # A lone surrogate stands for a byte of an argument that is not UTF-8.
                texts.add_text(name, text.encode(errors="replace").decode())
            output.save(building, pnginfo=texts)
        else:
            output.save(building)
