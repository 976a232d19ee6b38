"""What inference makes: images, videos, and how they are saved."""

from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from dstrain.data.output import save_image_or_video
from dstrain.graph import Frames


class Video(Frames):
    """A generated video: uint8 `pixels` (frames, height, width, 3) at `fps`."""

    def save(self, path: str | Path) -> None:
        """Write it as .mp4, whole or not at all; raises UsageError and SystemFault."""
        save_image_or_video(self, Path(path))


class Layers(list[Image.Image]):
    """Several images of one generation, which may be transparent."""

    def save(self, path: str | Path) -> None:
        """Write each: the first under this name, the others numbered after it."""
        save_image_or_video(self, Path(path))


Output = Image.Image | Video | Layers


def as_output(made: object) -> Output:
    """Return what the last decoder made as one of these."""
    if isinstance(made, Frames):
        return Video(made.pixels, made.fps)
    if isinstance(made, Iterable) and not isinstance(made, Image.Image):
        return Layers(made)
    assert isinstance(made, Image.Image)
    return made
