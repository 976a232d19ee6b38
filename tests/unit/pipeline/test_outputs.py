"""What a pipeline makes can be saved by the name of a file."""

from pathlib import Path

import torch
from dstrain import Frames, Layers, Video
from dstrain.pipeline.outputs import as_output
from PIL import Image


def test_an_image_stays_what_it_is_and_others_get_a_way_to_be_saved(
    tmp_path: Path,
) -> None:
    image = Image.new("RGB", (16, 16))
    assert as_output(image) is image
    layers = as_output([image, image])
    assert isinstance(layers, Layers)
    layers.save(tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.png", "a.png"]
    frames = Frames(torch.zeros(2, 16, 16, 3, dtype=torch.uint8), 16.0)
    video = as_output(frames)
    assert isinstance(video, Video)
    assert (video.pixels is frames.pixels, video.fps) == (True, 16.0)
    video.save(str(tmp_path / "a.mp4"))
    assert (tmp_path / "a.mp4").stat().st_size > 0
