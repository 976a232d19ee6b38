"""Rows and arguments follow from a table of inputs."""

from dataclasses import replace
from pathlib import Path

from dstrain import Frames
from dstrain.data import DataConfig, Resolution, load_cell, open_dataset
from dstrain.plugin import Column, Constant, Measured, one_of
from dstrain.registry import load_family
from dstrain.testing.rows import Size, inputs, least_sizes, usual_size, write_rows
from PIL import Image

from tests.support.kit import install_family


def test_rows_are_made_for_columns_of_every_kind_and_lack_what_is_optional(
    site: Path, tmp_path: Path
) -> None:
    install_family("kinds", site)
    plain = load_family("kinds").spec("base")
    more = {
        "film": Column("film", "video", multiple=24, frame_multiple=4, fps=16.0),
        "first": Column("film", "image", frame="first", multiple=24),
        "count": Measured("film", "frames"),
        "mask": Column("mask", "image", mode="L"),
        "layer": Column("layer", "image", mode="RGBA"),
        "pictures": Column("pictures", "images"),
        "words": Column("words", "texts"),
        "kind": Column("kind", check=one_of("canny", "depth")),
        "number": Column("number", "number"),
        "whole": Column("whole", "integer"),
        "area": Constant(64),
    }
    spec = replace(plain, inputs={**plain.inputs, **more})
    assert usual_size(spec) == Size(48, 48, 9)
    assert least_sizes(spec) == [
        Size(24, 24, 1),
        Size(24, 48, 5),
        Size(48, 24, 9),
        Size(48, 72, 13),
    ]
    folder = write_rows(spec, tmp_path / "data")
    dataset = open_dataset(
        DataConfig(folder, None, None, Resolution(None, None, 2**20)), spec.inputs
    )
    values = inputs(spec)
    lacking = {"first", "mask", "layer", "pictures", "number", "whole", "film", "count"}
    full = set(spec.inputs) - {"negative_prompt"}
    assert [set(row) for row in dataset.rows] == [full] * 3 + [full - lacking] * 2
    for name, cell in dataset.rows[0].items():
        loaded, value = load_cell(cell), values[name]
        assert type(loaded) is type(value), name
        if isinstance(value, Frames):
            assert (loaded.pixels.shape, loaded.fps) == (value.pixels.shape, value.fps)
        elif isinstance(value, Image.Image):
            assert (loaded.mode, loaded.size) == (value.mode, value.size)
            assert name == "first" or loaded.tobytes() == value.tobytes()
        elif name == "pictures":
            assert [image.tobytes() for image in loaded] == [
                image.tobytes() for image in value
            ]
        else:
            assert loaded == value, name
